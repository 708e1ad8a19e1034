"""Fetch the small files of a hub model into the user's cache. argv: results file, job file. Needs huggingface_hub."""

import json
import os
import sys

SMALL = 20 << 20
NAMES = (".json", ".jinja", ".py", ".txt", ".model")
# One try a request: "offline" is an answer, and the caller waits for it.
os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "8")
os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "8")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def say(**line):
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def kind(error):
    """The trouble that an exception of huggingface_hub, httpx or requests stands for, by its class and its causes."""
    seen, refused, depth = [], False, 0
    while error is not None and depth < 8:
        seen.extend(cls.__name__ for cls in type(error).__mro__)
        refused = refused or getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        error, depth = error.__cause__ or error.__context__, depth + 1
    if "GatedRepoError" in seen:
        return "gated"
    if any(name in seen for name in ("RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError")):
        return "missing"
    if refused:
        return "gated"
    if "OfflineModeIsEnabled" in seen:
        return "offline"
    if any("Timeout" in name for name in seen):
        return "timeout"
    if any(name in ("ConnectError", "ConnectionError", "NetworkError", "TransportError", "OSError") for name in seen):
        return "unreachable"
    return "failed"


def from_cache(name):
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, local_files_only=True)
    except Exception:
        return None


def main():
    with open(sys.argv[2], encoding="utf-8") as stream:
        name = json.load(stream)["id"]
    try:
        from huggingface_hub import HfApi, constants, hf_hub_download
    except ImportError as error:
        say(step="failed", trouble="no-client", detail=str(error)[:200])
        return
    try:
        if constants.HF_HUB_OFFLINE:
            folder = from_cache(name)
            if folder is None:
                say(step="failed", trouble="offline", detail="HF_HUB_OFFLINE is set")
            else:
                say(step="end", folder=folder)
            return
        info = HfApi().model_info(name, files_metadata=True, timeout=8)
        files = {item.rfilename: int(item.size or 0) for item in info.siblings or []}
        say(step="listing", files=files, revision=info.sha)
        folder = None
        for file, size in sorted(files.items()):
            inside = file.replace("\\", "/")
            if "/" in inside and not inside.startswith("additional_chat_templates/"):
                continue
            if not inside.endswith(NAMES) or size > SMALL:
                continue
            # By branch and not by commit: only then is the cache found again when there is no network.
            path = hf_hub_download(name, file)
            say(step="file", name=file)
            if "/" not in inside:
                folder = os.path.dirname(path)
        if folder is None:
            say(step="failed", trouble="missing", detail="the repository holds no configuration")
        else:
            say(step="end", folder=folder)
    except Exception as error:
        trouble = kind(error)
        folder = from_cache(name) if trouble in ("unreachable", "timeout", "offline") else None
        if folder is not None:
            say(step="end", folder=folder)
        else:
            text = str(error).strip()
            say(
                step="failed",
                trouble=trouble,
                detail=type(error).__name__ + ": " + (text.splitlines() or [""])[0][:200],
            )


if __name__ == "__main__":
    main()
