"""Reading a request: its budget, its size, and the body its engine shall get."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from simmoe.live.server.client import error_body

K_ARG = "simmoe_k"
"""Key of a request's budget in ``vllm_xargs``; the same as in the engine (live.engine.transport)."""

ALIAS_MARK = ":k="
"""Between a model's name and the budget in an alias."""

BYTES_A_TOKEN = 4
"""Prompts arrive as text; a policy is told of one token for every four bytes, rounded up."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """The budgets a deployment takes."""

    k_max: int
    default_k: int
    """Budget of a request that names none."""


class BadRequest(Exception):
    """A request no engine would take."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.body = error_body(400, message, param)


class ParsedRequest(NamedTuple):
    """What the router needs to know of a completion or chat completion."""

    body: bytes
    """For the engine: as it came, unless the model was an alias."""
    k: int
    num_prompt_tokens: int
    """Exact for prompts of token ids, estimated for text."""
    num_sequences: int
    """Engine requests it becomes: prompts times n."""


def parse_request(body: bytes, budgets: Budgets) -> ParsedRequest:
    """Return what a request's JSON says.

    Args:
        body: of a completion or chat completion request.
        budgets: the deployment's.
    Raises:
        BadRequest: no JSON object, or a budget that is none of the deployment's; the message names the range.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request's body is not JSON: {error}", "body") from None
    if not isinstance(data, dict):
        raise BadRequest("the request's body is not a JSON object", "body")
    k, is_alias = _take_budget(data, budgets)
    if data.get("use_beam_search") and k != budgets.default_k:
        raise BadRequest(f"vLLM's beam search runs at {budgets.default_k}, whatever {K_ARG} says", "use_beam_search")
    if is_alias:
        body = json.dumps(data).encode()
    num_prompts, num_tokens = _size_prompt(data)
    return ParsedRequest(body, k, num_tokens, num_prompts * _completions(data.get("n")))


def split_alias(model: str) -> tuple[str, str | None]:
    """Return a model's name and the text of its budget, None if it names none.

    >>> split_alias("olmoe:k=12"), split_alias("olmoe")
    (('olmoe', '12'), ('olmoe', None))
    """
    name, mark, budget = model.rpartition(ALIAS_MARK)
    return (name, budget) if mark and name else (model, None)


def alias_budget(text: str, budgets: Budgets) -> int | str:
    """Return the budget that an alias names, or the text itself where it is no number of a budget's length."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(budgets.k_max))
    return int(text) if is_number else text


def _take_budget(data: dict[str, Any], budgets: Budgets) -> tuple[int, bool]:
    """Return the request's budget and whether an alias named it, which is then rewritten in place."""
    if K_ARG in data:
        raise BadRequest(f"{K_ARG} is a field of vllm_xargs, not of the request itself", K_ARG)
    xargs = data.get("vllm_xargs")
    if xargs is None:
        xargs = {}
    if not isinstance(xargs, dict):
        raise BadRequest(f"vllm_xargs is a {type(xargs).__name__}; it must be an object", "vllm_xargs")
    named = xargs.get(K_ARG, budgets.default_k)
    model = data.get("model")
    name, text = split_alias(model) if isinstance(model, str) else ("", None)
    if text is None:
        return _check(named, budgets, "vllm_xargs"), False
    k = _check(alias_budget(text, budgets), budgets, "model")
    if K_ARG in xargs and named != k:
        raise BadRequest(f"model '{model}' and vllm_xargs.{K_ARG} {named!r} contradict each other; give one", "model")
    data["model"] = name
    data["vllm_xargs"] = {**xargs, K_ARG: k}
    return k, True


def _check(k: Any, budgets: Budgets, param: str) -> int:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= budgets.k_max:
        raise BadRequest(f"{K_ARG} is {k!r}; it must be an integer from 1 to {budgets.k_max}", param)
    return k


def _completions(n: Any) -> int:
    """Return how many completions a prompt gets; vLLM takes a number's text, and a float that is whole, for it."""
    try:
        return max(1, int(n))
    except (TypeError, ValueError, OverflowError):
        return 1


def _size_prompt(data: dict[str, Any]) -> tuple[int, int]:
    """Return how many prompts there are, at least 1, and their tokens."""
    prompt = data.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt), sum(_tokens(part) for part in prompt)
    if prompt is not None:
        return 1, _tokens(prompt)
    messages = data.get("messages")
    return 1, sum(_tokens(_content(message)) for message in messages) if isinstance(messages, list) else 0


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _tokens(prompt: Any) -> int:
    if isinstance(prompt, str):
        return -(-len(prompt.encode("utf-8", "surrogatepass")) // BYTES_A_TOKEN)
    return len(prompt) if isinstance(prompt, list) else 0
