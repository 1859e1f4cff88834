"""What makes a request impossible, said in one sentence."""

from serve.types import Progress, Request


def check_request(request: Request, most: int) -> None:
    """ValueError when the request can never run. `most`: tokens that one request can have."""
    prompt, new = len(request.prompt), request.sampling.max_new_tokens
    if prompt < 1 or new < 1:
        raise ValueError(
            f"request {request.id!r} has {prompt} prompt tokens and max_new_tokens {new}, the minimum of both is 1;"
            " give at least one token"
        )
    if request.key is not None and len(request.key) != prompt:
        raise ValueError(
            f"request {request.id!r} has {len(request.key)} cache key items for {prompt} prompt tokens; give one per"
            " token"
        )
    if prompt + new > most:
        raise ValueError(
            f"request {request.id!r} needs {prompt} prompt and {new} new tokens, the limit is {most} together; shorten"
            " the prompt or lower max_new_tokens"
        )


def check_progress(request: Request, progress: Progress) -> None:
    """ValueError when there is nothing to go on with, or nothing left to do."""
    known, new = len(request.prompt) + len(progress.generated), request.sampling.max_new_tokens
    if not (0 < progress.computed < known and len(progress.generated) < new):
        raise ValueError(
            f"request {request.id!r} comes with {progress.computed} of {known} tokens computed and"
            f" {len(progress.generated)} of {new} generated, at least one of each must be left; hand over requests that"
            " are not finished"
        )
