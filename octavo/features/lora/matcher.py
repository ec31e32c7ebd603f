"""`Matcher`: the tensors of an adapter's file, matched to the model's projections and checked. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.core.errors import ModelFileError
from octavo.features.lora.activation import check_activated
from octavo.features.lora.adapter_file import MAGNITUDE, ROWS, STACKED, STRAIGHT, SWAPPED, TABLE, WHOLE, A, B
from octavo.features.lora.layout import Manifest, Piece, Target, added_by
from octavo.features.lora.modules import Modules, Place
from octavo.features.lora.peft_config import PeftConfig
from octavo.features.lora.peft_names import BIAS, CONFIG, PREFIX, ROLES, ending_of

_MERGE = (
    "Or it changes norms, biases, positions, encoders or a classifier's head, which adapters can't in Octavo: then "
    "merge it into its base model."
)
_RESIZE = (
    "Or resize the base model to {} tokens (transformers: resize_token_embeddings), save it with the adapter's "
    "tokenizer and serve that, or merge the adapter into its base model."
)


class Matcher:
    """Maps the tensors of a file to the model's projections."""

    def __init__(
        self,
        path: Path,
        targets: Sequence[Target],
        modules: Modules,
        max_rank: int,
        base: str,
        added_tokens: int = 0,
    ) -> None:
        self._most_added = added_tokens
        self._path = path
        self._targets = targets
        self._max_rank = max_rank
        self._base = base
        self._renamed, self._experts = modules.renamed, modules.experts
        self._held, self._stacks_of = modules.held, modules.stacks_of
        self._name, self._outputs = dict(modules.name), dict(modules.outputs)
        """Of each place. A file may have one under another name, or as all of a module."""

    def find(self, shapes: Mapping[str, tuple[int, ...]], config: PeftConfig) -> dict[Place, dict[str, str]]:
        """Return what a file of PEFT has for each projection: role -> name of the tensor."""
        found: dict[str, dict[str, str]] = {}
        for name in shapes:
            inner = name.removeprefix(PREFIX)
            end = ending_of(inner)
            if end is None:
                raise self._unknown(name)
            module, role = inner.removesuffix(end), ROLES[end]
            table = self._table(module) if role in (WHOLE, BIAS) else None
            if role is BIAS:
                if table is None or shapes[name] != table[:1]:
                    raise self._unknown(name)
                continue
            if table is not None:
                saved = config.saves(module) or (config.ensure_weight_tying and self._is_tied(module, end))
                if not saved or self._is_copy(name, end, shapes):
                    self._check_table(name, shapes[name], table)
                    if shapes[name] != table and not saved:
                        found.setdefault(module, {})[TABLE] = name  # PEFT saves those of resized models unasked
                    continue
            found.setdefault(module, {})[role] = name
        self._share_rows(found, config)
        return self.placed(found, shapes, config)

    def _table(self, module: str) -> tuple[int, int] | None:
        """Return the shape of an embedding's or a head's weights; None for other modules."""
        for i, j in self._held(module):
            target, part = self._targets[i], self._targets[i].parts[j]
            if target.embedding or target.head:
                return (part.inputs, part.outputs) if target.embedding else (part.outputs, part.inputs)
        return None

    def _is_copy(self, name: str, end: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a tensor is saved twice, or is the base's table: PEFT saves both beside changed embeddings."""
        doubled = end == ".modules_to_save.weight" and f"{name.removesuffix(end)}.weight" in shapes
        return doubled or end in (".original_module.weight", ".token_adapter.base_layer.weight")

    def _is_tied(self, module: str, end: str) -> bool:
        """Return whether a tensor is the saved embedding as the head that is tied to it, which the configuration does
        not list. The base of a low-rank change is not."""
        return "base_layer" not in end and any(self._targets[place[0]].tied for place in self._held(module))

    def _share_rows(self, found: dict[str, dict[str, str]], config: PeftConfig) -> None:
        """Have a head that shares the embedding's table share its changed rows, too, unless it has others. Rows that
        the configuration does not name are a copy."""
        if not any(ROWS in roles for roles in found.values()):
            return
        changed = {place: module for module in found for place in self._held(module)}
        tables = (found[module] for place, module in changed.items() if self._targets[place[0]].embedding)
        rows = next((roles[ROWS] for roles in tables if ROWS in roles), None)
        for i, target in enumerate(self._targets):
            if rows is None or not target.tied:
                continue
            module = changed.get((i, 0), target.name(0))
            if ROWS not in found.get(module, {}) or not config.tokens_of(module):
                found.setdefault(module, {})[ROWS] = rows

    def placed(
        self, found: Mapping[str, dict[str, str]], shapes: Mapping[str, tuple[int, ...]], config: PeftConfig
    ) -> dict[Place, dict[str, str]]:
        """Return the same by place in the model."""
        if not found:
            raise ModelFileError(f"{self._path} has no tensors of an adapter.")
        places: dict[Place, dict[str, str]] = {}
        for module, given in found.items():
            held, roles = self._stack(module, given, shapes, config) or (self._held(module), given)
            if not held:
                raise self._unknown(next(iter(given.values())))
            for place in held:
                if place in places:
                    raise ModelFileError(
                        f"{self._path}: {module} and {self._name[place]} are the same weights of the model. Save the "
                        "adapter for one of them."
                    )
                places[place] = roles
                if STACKED in roles:
                    continue
                # Patterns of the configuration are for the names of what PEFT changed: modules, or tensors.
                tensor = f"{module}.weight"
                self._name[place] = tensor if config.names_parameter(tensor) else module
                own = self._renamed.get(place)
                if own is not None and module.endswith(own):
                    self._outputs[place] = self._targets[place[0]].parts[place[1]].outputs
        return places

    def _stack(
        self, module: str, roles: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], config: PeftConfig
    ) -> tuple[list[Place], dict[str, str]] | None:
        """Return the projections of all experts that a pair of matrices holds, and its roles with STACKED; None if it
        is of another kind.

        PEFT gives the pairs of a module's tensors names that do not tell which is whose: the first one's is inside the
        next one's. Without a gate, shapes do not tell either, since versions of PEFT differ in what they call inputs.
        """
        name = module.removesuffix(".base_layer")
        stacks = self._stacks_of(name)
        if not stacks or A not in roles or B not in roles:
            return None
        a, b = shapes[roles[A]], shapes[roles[B]]
        sides = {stack: self._sides(places[0]) for stack, places in stacks.items()}
        fitting = [stack for stack, own in sides.items() if own in ((a[-1], b[0]), (b[0], a[-1]))]
        named = [stack for stack in fitting if stack.endswith(tuple(config.parameters))]
        if not fitting:
            raise ModelFileError(
                f"{self._path}: tensors {roles[A]} and {roles[B]} have shapes {list(a)} and {list(b)}, which fit none "
                f"of {', '.join(stacks)}. {self._other_base}"
            )
        stack = (named or fitting)[0 if module != name else -1]
        places, (inputs, outputs) = stacks[stack], sides[stack]
        form = self._targets[places[0][0]].parts[places[0][1]].stack
        assert form is not None
        if inputs == outputs and not form.transposed:
            raise ModelFileError(
                f"{self._path}: {stack} has square matrices, and the file does not say which side has the inputs. "
                "Save the adapter with a pair for each expert, or merge it into its base model."
            )
        for place in places:
            self._name[place], self._outputs[place] = f"{name}.{stack.rpartition('.')[2]}", outputs
        return places, {**roles, STACKED: STRAIGHT if a[-1] == inputs else SWAPPED}

    def _sides(self, place: Place) -> tuple[int, int]:
        """Return the inputs and outputs of each matrix in the tensor of all experts that has a projection."""
        part = self._targets[place[0]].parts[place[1]]
        assert part.stack is not None
        return part.inputs, part.stack.outputs(part.outputs)

    def checked(
        self, found: Mapping[Place, Mapping[str, str]], config: PeftConfig, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Manifest, tuple[Mapping[str, str], ...]]:
        """Return the manifest and the tensors of its pieces, in order."""
        self._check_complete(found, config)
        places = sorted(found)
        pieces = [self._piece(place, found[place], config, shapes) for place in places]
        manifest = Manifest(tuple(pieces), config.invocation)
        self._check_added(manifest)
        check_activated(self._path, manifest, self._targets)
        return manifest, tuple(found[place] for place in places)

    def _piece(
        self, place: Place, roles: Mapping[str, str], config: PeftConfig, shapes: Mapping[str, tuple[int, ...]]
    ) -> Piece:
        target, name = self._targets[place[0]], self._name[place]
        part = target.parts[place[1]]
        outputs = self._outputs[place]
        if WHOLE in roles:
            return self._saved(place, roles, shapes)
        if ROWS in roles or TABLE in roles:
            return self._of_tokens(place, roles, config, shapes)
        if A not in roles or B not in roles:
            lacks = "A" if A not in roles else "B"
            raise ModelFileError(f"{self._path}: {name} lacks its matrix {lacks}. Save the adapter again.")
        a, b = shapes[roles[A]], shapes[roles[B]]
        if STACKED in roles:
            a, b = self._of_one_expert(place, a, b)
        rank = a[0] if len(a) == 2 else 0
        if len(a) != 2 or a[1] != part.inputs:
            raise self._misfit(roles[A], a, f"[rank, {part.inputs}]")
        if b != (outputs, rank):
            raise self._misfit(roles[B], b, f"[{outputs}, {rank}]")
        if not 0 < rank <= self._max_rank:
            raise ModelFileError(
                f"{self._path}: {name} has rank {rank}; this engine takes 1 to {self._max_rank}. Start it with "
                f"--max-lora-rank {rank}."
                if rank
                else f"{self._path}: {name} has rank 0. Save the adapter again."
            )
        stated = config.rank(name)
        if stated is not None and stated != rank:
            raise ModelFileError(
                f"{self._path}: {name} has rank {rank}, but {CONFIG} makes it {stated} (r, rank_pattern)."
            )
        gain = MAGNITUDE in roles
        if gain and target.expert >= 0:
            raise ModelFileError(
                f"{self._path}: {name} is an expert's projection with magnitudes (use_dora), which Octavo lacks. "
                "Merge the adapter into its base model."
            )
        if gain != config.use_dora:
            raise ModelFileError(
                f"{self._path}: {name} has {'a' if gain else 'no'} magnitude vector, and use_dora in {CONFIG} is "
                f"{config.use_dora}. Save the adapter again."
            )
        if gain and target.embedding:
            raise ModelFileError(
                f"{self._path}: {name} is an embedding with magnitudes (use_dora), which Octavo lacks. Merge the "
                "adapter into its base model."
            )
        if gain and math.prod(shapes[roles[MAGNITUDE]]) != outputs:
            raise self._misfit(roles[MAGNITUDE], shapes[roles[MAGNITUDE]], f"[{outputs}]")
        return Piece(*place, rank=rank, scale=config.scale(name, rank), gain=gain)

    def _of_one_expert(self, place: Place, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of an expert's matrices, given those of a pair for all experts."""
        stack = self._targets[place[0]].parts[place[1]].stack
        assert stack is not None
        experts = self._experts[stack.name]
        if a[0] % experts or b[1] != a[0]:
            raise ModelFileError(
                f"{self._path}: the matrices for {stack.name} have {a[0]} and {b[1]} ranks, which must be the same "
                f"multiple of its {experts} experts. {self._other_base}"
            )
        part = self._targets[place[0]].parts[place[1]]
        return (a[0] // experts, part.inputs), (self._outputs[place], a[0] // experts)

    def _saved(self, place: Place, roles: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> Piece:
        """Return the piece of a saved module."""
        target, name = self._targets[place[0]], self._name[place]
        part = target.parts[place[1]]
        if len(roles) > 1:
            raise ModelFileError(f"{self._path}: {name} is both a saved module and a low-rank one; save one of them.")
        if not (target.embedding or target.head):
            raise ModelFileError(
                f"{self._path}: tensor {roles[WHOLE]} replaces the weights of {name}; Octavo takes saved embeddings "
                "and heads only (modules_to_save). Merge the adapter into its base model."
            )
        expected = (part.inputs, part.outputs) if target.embedding else (part.outputs, part.inputs)
        shape = shapes[roles[WHOLE]]
        self._check_table(roles[WHOLE], shape, expected)
        return Piece(*place, whole=True, rows=0 if shape == expected else shape[0])

    def _check_table(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Raise unless an embedding or a head has as many tokens as the base's, or more by what is allowed."""
        if len(shape) != 2 or shape[1] != expected[1]:
            raise self._misfit(name, shape, str(list(expected)))
        more = shape[0] - expected[0]
        has = f"{self._path}: tensor {name} has {shape[0]} tokens, the served model {expected[0]}."
        if more < 0:
            raise ModelFileError(f"{has} An adapter can't remove {-more} tokens. {_RESIZE.format(shape[0])}")
        if more > self._most_added:
            raise ModelFileError(f"{has} {self._too_many(more)} {_RESIZE.format(shape[0])}")

    def _too_many(self, more: int) -> str:
        return (
            f"The adapter adds {more}, and this engine takes up to {self._most_added} (--lora-extra-vocab-size). On a "
            f"CPU, start it with --lora-extra-vocab-size {more}."
        )

    def _of_tokens(
        self, place: Place, roles: Mapping[str, str], config: PeftConfig, shapes: Mapping[str, tuple[int, ...]]
    ) -> Piece:
        """Return the piece of the rows of single tokens (trainable_token_indices)."""
        target, name = self._targets[place[0]], self._name[place]
        part = target.parts[place[1]]
        if not {*roles} <= {ROWS, TABLE} or not (target.embedding or target.head):
            raise ModelFileError(
                f"{self._path}: {name} has rows of single tokens (trainable_token_indices, or added ones)"
                + (", but is no embedding or head." if {*roles} <= {ROWS, TABLE} else " and other changes.")
                + " Merge the adapter into its base model."
            )
        tokens: tuple[int, ...] = ()
        if ROWS in roles:
            module = roles[ROWS].removeprefix(PREFIX).removesuffix(".token_adapter.trainable_tokens_delta")
            tokens = config.tokens_of(module)
        vocabulary, size = (part.inputs, part.outputs) if target.embedding else (part.outputs, part.inputs)
        if ROWS in roles and shapes[roles[ROWS]] != (len(tokens), size):
            raise self._misfit(
                roles[ROWS], shapes[roles[ROWS]], f"[{len(tokens)}, {size}], by {CONFIG} (trainable_token_indices)"
            )
        if TABLE in roles:
            known = {*tokens}
            tokens += tuple(one for one in range(vocabulary, shapes[roles[TABLE]][0]) if one not in known)
        end = max(tokens) + 1
        if end - vocabulary > self._most_added:
            raise ModelFileError(
                f"{self._path}: {CONFIG} has token {end - 1} among the trainable_token_indices, and the served model "
                f"has {vocabulary} tokens. {self._too_many(end - vocabulary)} {_RESIZE.format(f'at least {end}')}"
            )
        lacking = next((one for one in range(vocabulary, end) if one not in tokens), None)
        if lacking is not None:
            raise ModelFileError(
                f"{self._path}: {name} has a row for the added token {end - 1} and none for {lacking}. Save the "
                "adapter with save_embedding_layers=True."
            )
        return Piece(*place, tokens=tokens)

    def _check_added(self, manifest: Manifest) -> None:
        """Raise unless the embedding and the head have the same added tokens."""
        added = {True: 0, False: 0}
        for piece in manifest.pieces:
            target = self._targets[piece.target]
            if target.embedding or target.head:
                added[target.embedding] = max(added[target.embedding], added_by(piece, target))
        if added[True] != added[False]:
            raise ModelFileError(
                f"{self._path} adds {added[True]} tokens to the embedding and {added[False]} to the head, which "
                "must be the same. Save the adapter with save_embedding_layers=True, or merge it into its base model."
            )

    def _check_complete(self, found: Mapping[Place, Mapping[str, str]], config: PeftConfig) -> None:
        """Raise if the configuration names projections of the model that the file lacks, as with another base."""
        for place, name in self._name.items():
            target = self._targets[place[0]]
            if target.expert >= 0:
                continue  # in Transformers 5, experts are no modules that target_modules could name
            if place not in found and config.targets(name, linear=not target.embedding):
                raise ModelFileError(
                    f"{self._path} has nothing for {name}, which {CONFIG} names (target_modules). "
                    f"{self._other_base} Or the file is incomplete: save the adapter again."
                )
        changed = [place for place, roles in found.items() if ROWS in roles]
        names = {self._name[place] for place in changed}
        embeds = any(self._targets[place[0]].embedding for place in changed)
        for module in config.tokens:
            if not (any(name.endswith(module) for name in names) if module else embeds):
                raise ModelFileError(
                    f"{self._path} has no rows for the tokens of {module or 'the embedding'}, which {CONFIG} names "
                    "(trainable_token_indices). Save the adapter again."
                )
        self._check_parameters(found, config)

    def _check_parameters(self, found: Mapping[Place, Mapping[str, str]], config: PeftConfig) -> None:
        """Raise if the configuration names tensors that the model or the file lacks: the weights of all experts, or of
        one layer."""
        if not config.parameters:
            return
        there: dict[str, bool] = {}
        for place, name in self._name.items():
            stack = self._targets[place[0]].parts[place[1]].stack
            if stack is None:
                there[f"{name.removesuffix('.weight')}.weight"] = place in found
            elif STACKED in found.get(place, {}):
                there[name] = True
            else:
                there[stack.name] = False
        for name in config.parameters:
            fitting = [one for one in there if one == name or one.endswith(f".{name}")]
            lacking = next((one for one in fitting if not there[one]), None)
            if not fitting or lacking:
                raise ModelFileError(
                    f"{self._path}: {CONFIG} names {name} (target_parameters), "
                    + (f"but there is nothing for {lacking}. " if lacking else "which adapters can't change here. ")
                    + (self._other_base if lacking else f"{self._other_base} {_MERGE}")
                )

    @property
    def _other_base(self) -> str:
        stated = f" ({self._base})" if self._base else ""
        return f"The adapter was made for another base model{stated} than the one served."

    def _unknown(self, name: str) -> ModelFileError:
        return ModelFileError(
            f"{self._path}: tensor {name} belongs to no layer of the model that adapters can change. "
            f"{self._other_base} {_MERGE}"
        )

    def _misfit(self, name: str, shape: Sequence[int], expected: str) -> ModelFileError:
        return ModelFileError(
            f"{self._path}: tensor {name} has shape {list(shape)}; the served model makes it {expected}. "
            f"{self._other_base}"
        )
