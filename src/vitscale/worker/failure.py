"""What an exception that ended a rank is recorded as."""

from __future__ import annotations

import errno
import time
import traceback

from vitscale.store.records import ErrorLine

_LONGEST = 16_000
_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def error_line(error: BaseException) -> ErrorLine:
    """The record of `error`, with its traceback; told apart are running out of memory and out of disk."""
    text = "".join(traceback.format_exception(error))
    return ErrorLine(
        error_type=type(error).__name__,
        message=str(error)[:_LONGEST],
        traceback=text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n...\n{text[-_LONGEST // 2 :]}",
        out_of_memory=any(map(_is_out_of_memory, _chain(error))),
        disk_full=isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT),
        unix_seconds=time.time(),
    )


def _chain(error: BaseException) -> list[BaseException]:
    """`error` and what it was raised from: a user's model that runs out of memory arrives wrapped in a message."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _is_out_of_memory(error: BaseException) -> bool:
    """Only allocation failures: an illegal access or a lost device is not a lack of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MEMORY_MESSAGES)
