"""The files of deploy/ ask for metrics, routes and flags that there are."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvml_kit import FakeGpu, FakeNvml
from prometheus_client.parser import text_string_to_metric_families
from promql_kit import QueryError, selectors
from server_kit import HELLO, ask_now, get_now, make_house, saying

from octavo.cli.flags.args import server_from, values
from octavo.cli.serve import make_parser
from octavo.config import ServerConfig
from octavo.core.nvml import Nvml
from octavo.server.metrics import metrics
from octavo.server.metrics.gpus import GpuMetrics

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
ADDED = {"instance", "job"}
"""Labels that Prometheus adds."""
_ROW = re.compile(r"^\| (`[^|]+) \| (gauge|counter|histogram) \|", re.MULTILINE)


def read_yaml(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


def manifests() -> dict[str, Any]:
    """Kubernetes' objects by kind."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    found = [one for path in files for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def container() -> Any:
    (found,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def serving(words: list[str]) -> ServerConfig:
    """The settings of an octavo serve with these words; exits if one is unknown."""
    parser = make_parser()
    return server_from(values(parser, parser.parse_args(words)))


# Metrics


@pytest.fixture(scope="module")
def served() -> Mapping[str, tuple[set[str], dict[str, set[str]]]]:
    """Sample's name -> its labels, and their values, of a server with GPUs that has answered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "GpuMetrics", lambda: GpuMetrics(lambda: Nvml(FakeNvml(FakeGpu())), "0"))
        house = make_house(saying("hi"), accelerator="cuda")
        ask_now(house.app, "/v1/chat/completions", HELLO)
        text = get_now(house.app, "/metrics").body.decode()
    found: dict[str, tuple[set[str], dict[str, set[str]]]] = {"up": (set(), {})}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels, known = found.setdefault(sample.name, (set(), {}))
            labels |= set(sample.labels)
            for label, value in sample.labels.items():
                known.setdefault(label, set()).add(value)
    for name, labels in documented():
        found.setdefault(name, (labels, {}))
    # The engine's process has the metrics that this one has.
    found |= {f"octavo_engine_{name}": one for name, one in found.items() if name.startswith("process_")}
    return found


def documented() -> Iterator[tuple[str, set[str]]]:
    """Sample's name -> labels, of the tables of features in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for cell, kind in _ROW.findall(text):
        names, _, by = cell.partition(" by ")
        labels = {"model_name", "engine", *re.findall(r"`(\w+)`", by)}
        for name in re.findall(r"`(\w+)`", names):
            yield f"octavo:{name}" + ("_total" if kind == "counter" else ""), labels


def queries() -> Iterator[tuple[str, str]]:
    """(where, query) of the alerts, the dashboard and the autoscaler."""
    for group in read_yaml("prometheus/alerts.yaml")["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    board = json.loads((DEPLOY / "grafana" / "octavo.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for trigger in manifests()["ScaledObject"]["spec"]["triggers"]:
        yield "ScaledObject", trigger["metadata"]["query"]


QUERIES = list(queries())


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_a_query_asks_for_what_is_served(where: str, query: str, served: Mapping[str, Any]) -> None:
    found = selectors(query)
    assert found
    for one in found:
        assert one.name in served, f"{one.name} is not served"
        labels, known = served[one.name]
        assert {label for label, *_ in one.matchers} | one.grouped <= labels | ADDED, one
        for label, _, value in one.matchers:
            for word in value.split("|") if label in known and not value.startswith("$") else ():
                assert word in known[label] or (label, word) == ("status", "5xx") or label == "model_name", one


def test_there_are_queries_for_each_purpose() -> None:
    assert len(QUERIES) > 40
    alerts = {where for where, _ in QUERIES if where.startswith("Octavo")}
    assert alerts >= {"OctavoDown", "OctavoEngineStalled", "OctavoQueueGrows", "OctavoKvCacheFull", "OctavoErrors"}
    assert "OctavoDrained" in alerts


@pytest.mark.parametrize(
    "query",
    [
        "sum(rate(a[5m])",
        "rate(a)",
        "a{b=c}",
        "a > ",
        "a b",
        "histogram_quantile(a)",
        "sum by (x (a)",
        "a{b!'c'}",
    ],
)
def test_what_is_no_query_is_seen(query: str) -> None:
    with pytest.raises(QueryError):
        selectors(query)


def test_each_alert_says_what_to_do() -> None:
    for rule in read_yaml("prometheus/alerts.yaml")["groups"][0]["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        texts = rule["annotations"]
        assert set(texts) == {"summary", "action"}
        # The labels that its texts show are those of its result: of one selector, or of the aggregation around it.
        shown = set(re.findall(r"\$labels\.(\w+)", texts["summary"]))
        kept = selectors(rule["expr"])[0].grouped
        assert not kept or shown <= kept, rule["alert"]


def test_the_dashboard_is_as_its_tool_writes_it(tmp_path: Path) -> None:
    copy = tmp_path / "octavo.json"
    subprocess.run([sys.executable, str(ROOT / "tools" / "dashboard.py"), str(copy)], check=True)
    written = (DEPLOY / "grafana" / "octavo.json").read_text(encoding="utf-8")
    assert copy.read_text(encoding="utf-8") == written, "run python tools/dashboard.py"


def test_the_dashboard_uses_its_variables_and_has_no_overlaps() -> None:
    board = json.loads((DEPLOY / "grafana" / "octavo.json").read_text(encoding="utf-8"))
    names = {one["name"] for one in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert used - {"__rate_interval"} <= names
    cells = set()
    for one in board["panels"]:
        place = one["gridPos"]
        mine = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not mine & cells, one["title"]
        cells |= mine


def test_prometheus_reads_the_alerts_beside_it() -> None:
    config = read_yaml("prometheus/prometheus.yaml")
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
    jobs = {one["job_name"] for one in config["scrape_configs"]}
    asked = {v for _, query in QUERIES for one in selectors(query) for name, _, v in one.matchers if name == "job"}
    assert asked <= jobs


# Images, Kubernetes, systemd


def dockerfile() -> str:
    return (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")


def instruction(name: str) -> list[str]:
    """The JSON arguments of the last of these instructions."""
    found: list[str] = json.loads(re.findall(rf"^ *{name} (\[.*\])$", dockerfile(), flags=re.MULTILINE)[-1])
    return found


def test_the_image_copies_what_there_is() -> None:
    sources = [
        word for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(), re.MULTILINE) for word in line.split()
    ]
    names = {one for one in sources if one != "./"}
    assert all((ROOT / name).exists() for name in names)
    let_in = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in let_in if line.startswith("!")} == names


def test_the_image_installs_as_the_readme_does() -> None:
    assert "    pip install -c constraints.txt .\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install -c constraints.txt " in dockerfile()
    used = set(re.findall(r"OCTAVO_\w+", dockerfile()))
    package = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "octavo" / "hub").glob("*.py"))
    assert used
    assert all(f'"{name}"' in package for name in used)


def test_the_image_serves_to_others_and_asks_itself_whether_it_lives() -> None:
    entry = instruction("ENTRYPOINT")
    assert entry[:2] == ["octavo", "serve"]
    config = serving(["smollm2", *entry[2:]])
    assert config.host == "0.0.0.0"
    asked = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", dockerfile())
    assert asked is not None
    assert int(asked[1]) == config.port
    assert get_now(make_house(saying("hi")).app, asked[2]).status == 200
    compile(instruction("CMD")[2], "health check", "exec")
    assert "USER octavo" in dockerfile().splitlines()


@pytest.mark.parametrize("name", ["octavo", "octavo-gpu"])
def test_compose_serves_with_flags_that_there_are(name: str) -> None:
    service = read_yaml("docker/compose.yaml")["services"][name]
    config = serving(service["command"])
    assert config.shutdown_timeout_s < float(service["stop_grace_period"].removesuffix("s"))
    assert set(service["environment"]) == {"OCTAVO_API_KEY", "HF_TOKEN"}
    assert (DEPLOY / "docker" / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert [one.split(":")[1] for one in service["volumes"]] == ["/cache"]


def test_kubernetes_probes_ask_routes_that_there_are() -> None:
    house = make_house(saying("hi"))
    probes = {one: container()[one]["httpGet"]["path"] for one in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/live"}
    assert {get_now(house.app, path).status for path in probes.values()} == {200}
    house.lifecycle.drain()
    assert get_now(house.app, "/ready").status == 503
    assert get_now(house.app, "/live").status == 200, "a server that finishes its requests is not restarted"
    ports = {one["name"]: one["containerPort"] for one in container()["ports"]}
    assert all(container()[one]["httpGet"]["port"] in ports for one in probes)
    notes = manifests()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert get_now(make_house(saying("hi")).app, notes["prometheus.io/path"]).status == 200


def test_kubernetes_waits_for_the_last_answer() -> None:
    config = serving(container()["args"])
    pause = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = manifests()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert pause + config.shutdown_timeout_s < grace
    assert config.port == container()["ports"][0]["containerPort"]


def test_kubernetes_objects_fit_together() -> None:
    found = manifests()
    pod = found["Deployment"]["spec"]["template"]
    assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert found["Deployment"]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    mounted = {one["name"]: one["mountPath"] for one in container()["volumeMounts"]}
    assert set(mounted) == set(volumes)
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]
    assert f"VOLUME {mounted['cache']}" in dockerfile().splitlines()
    assert found["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]


def test_systemd_starts_and_ends_the_server() -> None:
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "systemd" / "octavo.service").read_text(encoding="utf-8"))
    words = shlex.split(unit["Service"]["ExecStart"])
    assert words[1:] == ["serve", "--config", "/etc/octavo/serve.yaml"]
    config = serving(["--config", str(DEPLOY / "systemd" / "serve.yaml")])
    assert config.shutdown_timeout_s < float(unit["Service"]["TimeoutStopSec"])
    assert unit["Service"]["KillMode"] == "mixed", "the engine must not get the signal beside its server"
