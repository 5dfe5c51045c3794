"""One error, three envelopes.

Whatever goes wrong with a request is an `ApiError`: status, code, message and, where one field is to
blame, its name. Whoever answers shapes it for the protocol the client speaks. The codes and statuses
are design.md's table; `STATUS_OF` is that table, and an `ApiError` made with `error(code, …)` can't
disagree with it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mlxpool.shared.text import cut

Protocol = Literal["openai", "anthropic", "responses"]

STATUS_OF: dict[str, int] = {
    "invalid_request": 400,
    "unsupported_parameter": 400,
    "unsupported_schema": 400,
    "context_length_exceeded": 400,
    "model_too_large": 400,
    "invalid_api_key": 401,
    "forbidden_origin": 403,
    "forbidden_host": 403,
    "not_found": 404,
    "model_not_found": 404,
    "response_not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "queue_full": 429,
    "internal_error": 500,
    "worker_crashed": 502,
    "load_failed": 503,
    "queue_timeout": 503,
    "gpu_leased": 503,
    "shutting_down": 503,
}

# OpenAI's and Anthropic's clients choose exception classes by status; the type is for people and logs.
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

# Refused fields → what Anthropic's own client looks for, to go on without them by itself: its tool runner
# asks for a conversation that the server keeps, and sends whole ones where it hears this.
_ANTHROPIC_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


class ApiError(Exception):
    """A refusal or failure a client is told about.

    status: HTTP status. code: a key of STATUS_OF. message: for a person; names the field, the value and
    what would work. param: the field to blame. retry_after_s: seconds, sent as Retry-After. anthropic: the
    message in Anthropic's envelope, where its clients know another wording.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        anthropic: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        # The name may be the client's own, and as long as a body.
        self.param = None if param is None else cut(param)
        self.retry_after_s = retry_after_s
        self.anthropic = anthropic

    def headers(self) -> dict[str, str]:
        """Headers that go with this error: Retry-After in whole seconds, at least 1, where it applies."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, round(self.retry_after_s)))}


def error(
    code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> ApiError:
    """An ApiError whose status is the table's for `code`."""
    return ApiError(STATUS_OF[code], code, message, param=param, retry_after_s=retry_after_s)


def context_exceeded(tokens: int, limit: int, field: str) -> ApiError:
    """400 for a prompt that leaves no room for an answer. tokens: the prompt's. limit: the enforced context,
    answer included. field: what the wire calls the prompt.

    The wording is each vendor's own: agents look for it, and compact the conversation.
    """
    code = "context_length_exceeded"
    # A prompt of just the limit's length is one token too long.
    most = limit if tokens > limit else limit - 1
    return ApiError(
        STATUS_OF[code],
        code,
        f"This model's maximum context length is {limit} tokens. However, your {field} resulted in {tokens} "
        f"tokens, which leaves no room for an answer. Please reduce the length of the {field} to at most "
        f"{limit - 1} tokens.",
        param=field,
        anthropic=f"prompt is too long: {tokens} tokens > {most} maximum",
    )


def protocol_of(path: str) -> Protocol:
    """Whose envelope an error on this path is shaped in."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "responses" if path.startswith("/v1/responses") else "openai"


def envelope(
    err: ApiError, protocol: Protocol = "openai", request_id: str | None = None
) -> dict[str, object]:
    """The JSON body of an error answer, as `protocol`'s clients expect it. request_id: where it is known;
    Anthropic's clients look for it in the body."""
    if protocol == "anthropic":
        kind = _ANTHROPIC_TYPES.get(err.status, "api_error")
        message = err.message if err.anthropic is None else err.anthropic
        told = {} if request_id is None else {"request_id": request_id}
        body: dict[str, object] = {"type": kind, "message": message, "code": err.code}
        if err.code == "unsupported_parameter" and err.param in _ANTHROPIC_DETAILS:
            body["details"] = _ANTHROPIC_DETAILS[err.param]
        return {"type": "error", "error": body, **told}
    kind = _OPENAI_TYPES.get(err.status, "server_error")
    return {"error": {"message": err.message, "type": kind, "param": err.param, "code": err.code}}


def encode(err: ApiError, protocol: Protocol = "openai", request_id: str | None = None) -> bytes:
    """`envelope` as JSON bytes."""
    return msgspec.json.encode(envelope(err, protocol, request_id))


def stream_event(
    err: ApiError, protocol: Protocol = "openai", request_id: str | None = None, sequence: int = 0
) -> bytes:
    """The SSE bytes that end a stream with this error, terminal marker included where there is one. sequence:
    the event's number among the stream's; of Responses alone."""
    body = encode(err, protocol, request_id)
    if protocol == "anthropic":
        return b"event: error\ndata: " + body + b"\n\n"
    if protocol == "responses":
        told = {"code": err.code, "message": err.message, "param": err.param}
        flat = {"type": "error", "sequence_number": sequence, **told}
        return b"event: error\ndata: " + msgspec.json.encode(flat) + b"\n\n"
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"
