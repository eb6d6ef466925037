"""From a file of a source to its documents' texts: formats, the rule for bad rows, errors told apart."""

from nstrain.data.readers.errors import BadUpload, ChangedFile, MissingColumn, UnusableFile, bad_upload
from nstrain.data.readers.formats import Estimate, estimate, read_rows, refuse_missing_columns, scan_columns
from nstrain.data.readers.pinned import read_pinned, verify_pinned
from nstrain.data.readers.rows import MAX_DOCUMENT_BYTES, NO_STRATUM, Row
from nstrain.data.readers.settings import ReaderSettings

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "NO_STRATUM",
    "BadUpload",
    "ChangedFile",
    "Estimate",
    "MissingColumn",
    "ReaderSettings",
    "Row",
    "UnusableFile",
    "bad_upload",
    "estimate",
    "read_pinned",
    "read_rows",
    "refuse_missing_columns",
    "scan_columns",
    "verify_pinned",
]
