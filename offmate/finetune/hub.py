"""The Hugging Face Hub: where a result goes if `push` names a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ArgumentValueError, OffmateError
from .names import SOURCES

_REMEDY = "log in with `hf auth login`, or set HF_TOKEN to a token with write access"


def check_push(repository: str | None) -> None:
    """Raise OffmateError before a run if its result could not be sent to a repository: no network, or no right to."""
    if repository is None:
        return
    hub = _hub()
    if hub.get_token() is None:
        raise ArgumentValueError(f"push {repository!r}: this machine is not logged in to the Hub; {_REMEDY}")
    try:
        owner = hub.HfApi().whoami()
    except Exception as error:  # the library's errors and those of its HTTP client
        raise OffmateError(
            f"push {repository!r}: the Hub does not respond ({_first_line(error)}); {_REMEDY}"
        ) from error
    names = [owner["name"], *(org["name"] for org in owner.get("orgs", []))]
    if repository.partition("/")[0] not in names:
        raise ArgumentValueError(
            f"push {repository!r}: you are logged in as {owner['name']!r} and may write only to {', '.join(names)}"
        )


def push(output: Path, repository: str, aside: tuple[str, ...]) -> str:
    """Send a result to a repository of the Hub, which is made, for its owner alone, if it does not exist.

    Parameters
    ----------
    aside: folders of `output` that stay here.

    Returns: the address of the repository.
    Raises: OffmateError if it cannot be sent; the result stays in its folder.
    """
    api = _hub().HfApi()
    try:
        url = str(api.create_repo(repository, private=True, exist_ok=True))
        hidden = [pattern for name in aside for pattern in (f"{name}/**", f"{name}/*")]
        api.upload_folder(
            repo_id=repository, folder_path=output,
            ignore_patterns=[*hidden, ".*", SOURCES, "*.before-*", "tensorboard/*", "wandb/*"],
            commit_message="Fine-tuned with offmate",
        )  # fmt: skip
    except Exception as error:  # the library's errors and those of its HTTP client
        raise OffmateError(
            f"push {repository!r}: the result could not be sent ({_first_line(error)}). It is complete in {output}; "
            f"send it again with: offmate finetune --output {output} --resume --push {repository}"
        ) from error
    return url


def _hub() -> Any:
    import huggingface_hub

    return huggingface_hub


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
