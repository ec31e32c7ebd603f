"""`POST /v1/decisions`."""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.output import RequestOutput
from octavo.server.body import parse_body
from octavo.server.context import ServerContext, engine_id
from octavo.server.errors import json_response
from octavo.server.extras import check_undeclared
from octavo.server.openai.decide.protocol import (
    Decision,
    DecisionBody,
    DecisionUsage,
    InputDetails,
    OutputDetails,
    Question,
)
from octavo.server.openai.decide.questions import answer_to, conversation, labels_for, options_of
from octavo.server.openai.generation import GenerationJob, collect
from octavo.server.openai.next_token import asking_for, logprobs_of
from octavo.server.stream import until_disconnect


async def decisions(ctx: ServerContext, request: Request) -> Response:
    """Answer each question by the probabilities of the model's next token."""
    body = await parse_body(request, DecisionBody, ctx.config.max_body_bytes)
    ctx = await ctx.for_request(request, body.model, body)
    warnings = check_undeclared(body, strict=ctx.config.strict_params)
    name = f"decision-{request.state.request_id}"
    jobs, tokens = [], []
    for number, question in enumerate(body.questions):
        labels = labels_for(len(options_of(question)), ctx.frontend.tokenizer, f"questions.{number}")
        tokens.append(list(labels.values()))
        jobs.append(await _job(ctx, body, question, labels, name))
    outputs = await until_disconnect(request.receive, collect(ctx, jobs))
    answers = [
        answer_to(question, logprobs_of(output, asked))
        for question, output, asked in zip(body.questions, outputs, tokens, strict=True)
    ]
    return json_response(
        Decision(model=ctx.model, answers=answers, usage=_usage(jobs, outputs), warnings=warnings or UNSET)
    )


async def _job(
    ctx: ServerContext, body: DecisionBody, question: Question, labels: dict[str, int], name: str
) -> GenerationJob:
    params = asking_for(list(labels.values()))
    messages = conversation(body.input, question, list(labels))
    try:
        text = ctx.frontend.render_chat(messages, template_kwargs={"enable_thinking": False})
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param="input", value=error.value) from None
    made = await ctx.frontend.prepare_async(
        text,
        params,
        request_id=engine_id(name),
        priority=ctx.priority(None),
        tenant=ctx.tenant,
        namespace=body.cache_salt or "",
        add_special_tokens=False,
        param="input",
        options=ctx.options,
    )
    return GenerationJob(made, None, params)


def _usage(jobs: list[GenerationJob], outputs: list[RequestOutput]) -> DecisionUsage:
    asked = sum(len(job.prompt_tokens) for job in jobs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return DecisionUsage(asked, InputDetails(cached), len(jobs), OutputDetails(), asked + len(jobs))
