"""`python -m tools.resources_page` (make resources): write docs/reference/resources.md.

The fields are those of the definitions in crds/.  The examples are the first object of each kind
in deploy/quickstart.yaml and on the page about resources.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "resources.md"
_HEAD = """\
# Resources on Kubernetes

`make resources` writes this page from the definitions in `crds/`; do not edit it.

The fields of `spec` of each kind of `popmq.io/v1beta1`.
[How to use them](../how-to/kubernetes-resources.md) is a guide, and
[conditions](conditions.md) are what `status` reports.
"""
_KINDS = ("brokercluster", "topic", "consumergroup", "user", "lagreport")


def page() -> str:
    examples = {value["kind"]: text for text, value in objects()}
    parts = [_HEAD]
    for name in _KINDS:
        definition = yaml.safe_load((ROOT / "crds" / f"{name}.yaml").read_text(encoding="utf-8"))
        (version,) = definition["spec"]["versions"]
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        kind = definition["spec"]["names"]["kind"]
        rows = "\n".join(row(path, field) for path, field in fields(spec))
        table = f"| field | type | default | meaning |\n|---|---|---|---|\n{rows}"
        parts.append(f"## {kind}\n\n```yaml\n{examples[kind]}\n```\n\n{table}\n")
    return "\n".join(parts)


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """From the last to the first, so that the first one of a kind stays in a dict."""
    guide = (ROOT / "docs" / "how-to" / "kubernetes-resources.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    start = (ROOT / "deploy" / "quickstart.yaml").read_text(encoding="utf-8")
    texts = [text.strip() for block in [*blocks, start] for text in block.split("\n---\n")]
    for text in reversed(texts):
        value = yaml.safe_load(text)
        if isinstance(value, dict) and "kind" in value:
            yield text, value


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}{name}", field
        yield from fields(field, f"{path}{name}.")
        if isinstance(field.get("items"), dict):
            yield from fields(field["items"], f"{path}{name}[].")


def row(path: str, field: dict[str, Any]) -> str:
    values = field.get("enum")
    kind = field.get("type", "integer or string")
    if values:
        kind = ", ".join(f"`{value}`" for value in values if value)
    default = field.get("default")
    shown = "" if default in (None, {}, []) else f"`{default}`".replace("True", "true")
    meaning = field.get("description", "").replace("|", "\\|").strip()
    return f"| `{path}` | {kind} | {shown.replace('False', 'false')} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE.relative_to(ROOT)}\n")
