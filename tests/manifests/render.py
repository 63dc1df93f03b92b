"""Renders the chart with Helm and validates manifests, in the environment that has both.

`.venv-manifests/bin/python tests/manifests/render.py`: takes JSON `{"charts": [values], "manifests": [document]}` and
answers `{"lint": [message], "charts": [[document] or error], "manifests": [fault or null]}`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "moe-serve"
VERSIONS = ("1.30", "1.37")  # Chart.yaml's oldest, and the newest that the package knows


def render(values: dict[str, Any]) -> list[dict[str, Any]] | str:
    """Documents; or the error, as text."""
    try:
        with helm_python.Chart.load(str(CHART)) as chart:
            chart.validate_schema(values)
            texts = chart.render(values, name="moe-serve", namespace="default").values()
        return [document for text in texts for document in yaml.safe_load_all(text) if document]
    except helm_python.HelmError as error:
        return str(error)


def fault(document: dict[str, Any]) -> str | None:
    """Why Kubernetes would refuse it, by its schemas without unknown fields; None if it would not."""
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            return f"{version}: {error.message}"
    return None


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    lint = helm_python.lint(str(CHART), strict=True)
    answer = {
        "lint": [each["error"] for each in lint["messages"] if each["severity"] > 1] + lint["errors"],
        "charts": [render(values) for values in asked["charts"]],
        "manifests": [fault(document) for document in asked["manifests"]],
    }
    json.dump(answer, sys.stdout)
