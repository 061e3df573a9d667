"""The CRDs: structural, and of one mind with the code that reads what they let through."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube.clusters import cluster, read

from popmq.cli.metadata import DURABILITIES, GROUP_TYPES, TOPIC_TYPES
from popmq.operator.cluster.status import WORST_FIRST
from popmq.operator.declared.declared_resources import read_declared
from popmq.operator.model.lag_reports import read_report
from popmq.operator.model.manifest import CONSUMER_GROUP, TOPIC, ResourceKind

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT / "crds"
NAMES = ("brokercluster", "consumergroup", "lagreport", "topic", "user")


def definition(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CRDS / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded


def schema_of(name: str) -> dict[str, Any]:
    (version,) = definition(name)["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def parts(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from parts(below, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from parts(schema[key], f"{path}[]")


def with_defaults(schema: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    filled = dict(value)
    for name, below in schema.get("properties", {}).items():
        if name not in filled and "default" in below:
            filled[name] = below["default"]
        if isinstance(filled.get(name), dict):
            filled[name] = with_defaults(below, filled[name])
    return filled


def test_there_is_a_file_for_each_kind() -> None:
    assert sorted(path.stem for path in CRDS.glob("*.yaml")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_a_schema_has_a_type(name: str) -> None:
    for path, part in parts(schema_of(name)):
        assert "type" in part or part.get("x-kubernetes-int-or-string"), path


@pytest.mark.parametrize("name", NAMES)
def test_every_field_has_a_description(name: str) -> None:
    fields = [
        (path, part)
        for path, part in parts(schema_of(name))
        if path.startswith((".spec", ".status")) and not path.endswith("[]")
    ]
    assert len(fields) > 15
    assert [path for path, part in fields if not part.get("description")] == []


@pytest.mark.parametrize("name", NAMES)
def test_no_array_of_a_status_is_required(name: str) -> None:
    status = schema_of(name)["properties"]["status"]
    assert "required" not in status


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_says_what_to_do(name: str) -> None:
    for path, part in parts(schema_of(name)):
        for rule in part.get("x-kubernetes-validations", ()):
            assert rule["message"], path


def test_the_defaults_of_the_definition_are_those_of_the_code() -> None:
    filled = with_defaults(schema_of("brokercluster")["properties"]["spec"], {})
    assert filled
    assert read(cluster(**filled)) == read(cluster())


@pytest.mark.parametrize(("name", "kind"), [("topic", TOPIC), ("consumergroup", CONSUMER_GROUP)])
def test_the_defaults_of_what_is_declared_are_those_of_the_code(
    name: str, kind: ResourceKind
) -> None:
    filled = with_defaults(schema_of(name)["properties"]["spec"], {})
    assert filled
    metadata = {"name": "x"}
    with_them = read_declared(kind, {"metadata": metadata, "spec": filled})
    without = read_declared(kind, {"metadata": metadata, "spec": {}})
    assert with_them.settings == without.settings
    assert with_them.delete == without.delete


@pytest.mark.parametrize(
    ("name", "field", "choices"),
    [
        ("topic", "type", TOPIC_TYPES),
        ("topic", "durability", DURABILITIES),
        ("consumergroup", "type", GROUP_TYPES),
    ],
)
def test_what_a_command_can_choose_can_be_declared(
    name: str, field: str, choices: tuple[str, ...]
) -> None:
    declared = schema_of(name)["properties"]["spec"]["properties"][field]["enum"]
    assert sorted(item.lower() for item in declared) == sorted(choices)


def test_the_defaults_of_a_report_are_those_of_the_code() -> None:
    filled = with_defaults(schema_of("lagreport")["properties"]["spec"], {})
    metadata = {"name": "x", "generation": 1}
    with_them = read_report({"metadata": metadata, "spec": filled}, default_image="x")
    without = read_report({"metadata": metadata, "spec": {}}, default_image="x")
    assert replace(with_them, manifest={}) == replace(without, manifest={})


def test_each_reason_of_a_condition_is_told_with_what_to_do() -> None:
    pattern = re.compile(
        r"""(?:ConditionValue\(\w+,|_refuse_removal\(stays,|\]\ =\ \(|reason\ =\ \(?)
        \s*"([A-Z]\w+)\"""",
        re.VERBOSE,
    )
    sources = (ROOT / "operator/popmq/operator").rglob("*.py")
    reasons = {
        match for path in sources for match in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert len(reasons) > 25, sorted(reasons)
    reasons.update(WORST_FIRST)
    page = (ROOT / "docs/reference/conditions.md").read_text(encoding="utf-8")
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in page] == []


def test_the_scale_of_a_cluster_is_its_proxies() -> None:
    (version,) = definition("brokercluster")["spec"]["versions"]
    assert version["subresources"]["scale"] == {
        "specReplicasPath": ".spec.proxies.replicas",
        "statusReplicasPath": ".status.proxies.replicas",
        "labelSelectorPath": ".status.proxies.selector",
    }


def unknown_parts(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    """Fields that the schema does not have, and values that its enums do not."""
    match value:
        case dict():
            known = schema.get("properties", {})
            for name, below in value.items():
                if name in known:
                    yield from unknown_parts(known[name], below, f"{path}.{name}")
                elif known and "additionalProperties" not in schema:
                    yield f"{path}.{name}"
        case list():
            for below in value:
                yield from unknown_parts(schema["items"], below, f"{path}[]")
        case _ if "enum" in schema and value not in schema["enum"]:
            yield f"{path}: {value}"


def test_objects_on_the_pages_have_only_what_the_definitions_know() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    blocks = re.findall(r"^```yaml\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)
    files = [ROOT / "deploy" / f"{name}.yaml" for name in ("quickstart", "showcase")]
    texts = [*blocks, *(path.read_text(encoding="utf-8") for path in files)]
    values = [value for text in texts for value in yaml.safe_load_all(text)]
    own = [
        value
        for value in values
        if isinstance(value, dict) and value.get("apiVersion") == "popmq.io/v1beta1"
    ]
    assert {value["kind"].lower() for value in own} == set(NAMES)
    for value in own:
        schema = schema_of(value["kind"].lower())["properties"]["spec"]
        assert list(unknown_parts(schema, value["spec"], value["kind"])) == []
