"""Reading JSON from servers that may answer anything."""

from __future__ import annotations

import json
from typing import Any

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What comes of reading an answer that is no JSON, is nested too deeply, or is of another shape."""


def read_models(body: bytes) -> list[dict[str, Any]]:
    """Return the models of an answer to ``/v1/models``, the ``id`` of each as text.

    Raises:
        one of MALFORMED: it lists none.
    """
    return [{**model, "id": str(model["id"])} for model in json.loads(body)["data"]]
