"""Download a model's tokenizer from the Hugging Face hub.

    HF_TOKEN=… python scripts/download_tokenizer.py --repo_id meta-llama/Llama-3.1-8B

Only the files that titan reads are fetched. A repository that asks for a login needs a token: best in HF_TOKEN, or as
`huggingface-cli login` has stored it, since other users of a machine see a command's arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from titan.config.errors import UserError
from titan.config.startup import exit_on_mistake
from titan.data.tokenizer import build_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")


def main(argv: Sequence[str] | None = None) -> None:
    """Download, and say what model.tokenizer_path has to be.

    Raises:
        SystemExit: status 2 after a mistake was printed.
    """
    options = parser().parse_args(argv)
    with exit_on_mistake():
        target = Path(options.local_dir) / options.repo_id.rpartition("/")[2]
        fetched = list(download(options.repo_id, options.tokenizer_path, target, options.hf_token))
        folder = target / options.tokenizer_path
        tokenizer = build_tokenizer(str(folder))
    print(f"{', '.join(fetched)}: {tokenizer.description}")
    print(f'set model.tokenizer_path = "{folder}"')


def download(repo_id: str, subfolder: str, target: Path, token: str | None) -> Iterator[str]:
    """Fetch the tokenizer's files of a repository, or of a folder in it, and name each that it has.

    Args:
        repo_id: owner/name.
        subfolder: of the repository; "" for its top, where a tokenizer.model may also be in original/.
        target: the folder that they go to, by the names that they have in the repository.
        token: of the hub's; None takes HF_TOKEN's or the one that is stored.

    Raises:
        UserError: the hub can't be reached or refuses, or there is no such file.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    wanted = [f"{subfolder}/{name}" if subfolder else name for name in FILES]
    if not subfolder:
        wanted.append("original/tokenizer.model")
    try:
        there = HfApi(token=token).list_repo_files(repo_id)
        found = [name for name in wanted if name in there]
        if not found:
            near = [name for name in there if "tokenizer" in name]
            raise UserError(
                f"--repo_id {repo_id} has none of {', '.join(wanted)}; "
                + (f"it has {', '.join(near)}: give the folder as --tokenizer_path" if near else "it has no tokenizer")
            )
        for name in found:
            hf_hub_download(repo_id, name, local_dir=target, token=token)
            yield name
    except GatedRepoError as error:
        raise UserError(
            f"--repo_id {repo_id} is for those who were granted access: ask for it on the model's page, and set "
            "HF_TOKEN to a token of the account that has it"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"--repo_id {repo_id}: the hub has no such repository, or shows it only with a token (HF_TOKEN)"
        ) from error
    except HFValidationError as error:
        raise UserError(f"--repo_id {repo_id}: {error}") from error
    except UserError:
        raise
    except Exception as error:  # the network: many libraries' errors
        raise UserError(f"--repo_id {repo_id} can't be downloaded: {type(error).__name__}: {error}") from error


def parser() -> argparse.ArgumentParser:
    """What the command line may hold."""
    options = argparse.ArgumentParser(
        description="Download a model's tokenizer from the Hugging Face hub.", allow_abbrev=False
    )
    options.add_argument("--repo_id", required=True, help="the repository, such as meta-llama/Llama-3.1-8B")
    options.add_argument(
        "--tokenizer_path", default="", metavar="FOLDER", help="folder of the repository, such as original (unset: top)"
    )
    options.add_argument(
        "--local_dir", default="assets/tokenizer", metavar="FOLDER", help="where it goes (default assets/tokenizer)"
    )
    options.add_argument("--hf_token", metavar="TOKEN", help="access token; HF_TOKEN in the environment is safer")
    return options


if __name__ == "__main__":
    main()
