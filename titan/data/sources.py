"""Where a run's text comes from: the datasets that `training.dataset` can name.

Local data (files, lines, rows) are `Documents`: each has a number, so that any order is a matter of arithmetic. Hub
datasets are `StreamedDocuments`, read as they arrive. Token files are neither: they were text once.
No dataset knows of ranks, epochs of a run, or tokens; a row that can't be read is reported, never dropped or mended.
"""

import difflib
import os
from collections.abc import Callable

from titan.config.derived import source_names, source_text
from titan.config.errors import UserError, of_source
from titan.config.job_config import Training
from titan.data.documents import Documents, StreamedDocuments
from titan.data.hub import open_c4, open_hub
from titan.data.json_files import open_json
from titan.data.mixture import MixedSource, Mixture
from titan.data.tables import is_saved, open_parquet, open_saved
from titan.data.text_files import open_python_stdlib, open_text
from titan.data.token_files import TokenFiles, open_token_files
from titan.data.token_windows import windows_of
from titan.data.tokenizer import Tokenizer
from titan.observability.logging import logger

PlainSource = Documents | StreamedDocuments | TokenFiles
Source = PlainSource | Mixture
Factory = Callable[[Training], Documents | StreamedDocuments]


def _or_saved(open_files: Factory) -> Factory:
    """Opens files, or a folder that the datasets library saved, whichever is there."""
    return lambda training: open_saved(training) if is_saved(training) else open_files(training)


_factories: dict[str, Factory] = {
    "python_stdlib": open_python_stdlib,
    "text": _or_saved(open_text),
    "json": _or_saved(open_json),
    "parquet": _or_saved(open_parquet),
    "c4": open_c4,
}


TOKENS = "tokens"  # the dataset that is no text


def open_source(training: Training, tokenizer: Tokenizer) -> Source:
    """What a run reads: token files, documents as `open_documents` finds them, or a mixture of such sources.

    Raises:
        UserError: as opening one of them does.
    """
    if not training.sources:
        return _open_plain(training, tokenizer)
    sources = []
    for name, table in zip(source_names(training), training.sources, strict=True):
        text = source_text(training, table)
        try:
            opened = _open_plain(text, tokenizer)
        except UserError as error:
            raise UserError(of_source(f'training.sources "{name}"', error)) from error
        sources.append(MixedSource(name, text, opened, table.weight))
    mixture = Mixture(sources, training.source_stages)
    logger.info(f"a mixture of {len(sources)} sources: {mixture.describe(mixture.weights(0, 0))}")
    return mixture


def _open_plain(training: Training, tokenizer: Tokenizer) -> PlainSource:
    if training.dataset != TOKENS:
        return open_documents(training)
    files = open_token_files(training, tokenizer)
    windows = windows_of(files, training.seq_len)
    logger.info(
        f"dataset tokens: {len(files):,} tokens, {files.documents:,} documents in {files.shards:,} shards from "
        f"{training.dataset_path}"
    )
    left = len(files) - 1 - windows * training.seq_len
    logger.info(
        f"an epoch is {windows:,} windows of {training.seq_len:,} tokens; its last {left:,} tokens are left out"
    )
    return files


def open_documents(training: Training) -> Documents | StreamedDocuments:
    """The documents that `training.dataset`, `dataset_path` and the fields beside them name.

    Raises:
        UserError: there is no such dataset or file, it can't be read as what it's said to be, or it has no document.
    """
    name = training.dataset
    check_dataset(name)
    documents = _factories[name](training) if name in _factories else open_hub(training, name, training.dataset_subset)
    if isinstance(documents, Documents) and not len(documents):
        raise UserError(
            f"training.dataset = {name!r} has 0 documents (training.dataset_path = {training.dataset_path!r}, "
            f"split {training.dataset_split!r}): nothing to train on."
        )
    size = f"{len(documents):,} documents" if isinstance(documents, Documents) else f"{documents.num_shards:,} shards"
    logger.info(f"dataset {name}: {size}{f' from {training.dataset_path}' if training.dataset_path else ''}")
    return documents


def check_dataset(name: str) -> None:
    """Refuse what can't be a dataset, by its name alone: nothing is read and no library for it is imported.

    Raises:
        UserError: the name is neither registered nor of a hub id's form, or it is a path.
    """
    known = sorted([*_factories, TOKENS])
    if name in known:
        return
    if os.path.exists(os.path.expanduser(name)):
        raise UserError(
            f"training.dataset = {name!r} is a path. Give it as training.dataset_path, and text, json or parquet as "
            "training.dataset."
        )
    if "/" not in name:
        near = difflib.get_close_matches(name, known)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise UserError(
            f"training.dataset = {name!r} isn't a dataset. {hint}Known: {', '.join(known)}; a hub id has "
            "the form owner/name."
        )


def register_dataset(name: str, factory: Factory) -> None:
    """Make `training.dataset = name` mean what `factory(training)` returns. For modules of experimental.custom_import.

    Raises:
        ValueError: the name is taken.
    """
    if name in (*_factories, TOKENS):
        raise ValueError(f"a dataset {name!r} exists already")
    _factories[name] = factory
