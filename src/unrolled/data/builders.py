"""Data made from installed packages, named builder:NAME where a configuration names a file."""

from __future__ import annotations

import importlib
import unicodedata
from collections import Counter
from collections.abc import Callable
from difflib import get_close_matches

from unrolled.data.values import DataError, Row

PREFIX = "builder:"

SURNAMES = {
    "Croatian": {"hr_HR": ["last_names"]},
    "Dutch": {"nl_NL": ["last_names"]},
    "English": {"en": ["last_names"], "en_GB": ["last_names"]},
    "Estonian": {"et_EE": ["last_names_est"]},
    "Finnish": {"fi_FI": ["last_names"]},
    "French": {"fr_FR": ["last_names"], "fr_QC": ["last_names"]},
    "German": {"de_AT": ["last_names"], "de_DE": ["last_names"]},
    "Irish": {"ga_IE": ["last_names"]},
    "Italian": {"it_IT": ["last_names"]},
    "Polish": {"pl_PL": ["male_last_names", "unisex_last_names"]},
    "Slovak": {"sk_SK": ["last_names_male"]},
    "Spanish": {"es_ES": ["last_names"]},
}


def build(source: str) -> list[Row]:
    """The examples of `source` = builder:NAME. DataError where there is no such builder or its package is missing."""
    name = source.removeprefix(PREFIX)
    if name not in BUILDERS:
        close = get_close_matches(name, BUILDERS, n=1)
        hint = f"did you mean {PREFIX}{close[0]}?" if close else f"there are {', '.join(BUILDERS)}"
        raise DataError(f"{source}: no such builder, {hint}")
    examples = BUILDERS[name]()
    return [Row(line, text, label) for line, (text, label) in enumerate(examples, 1)]


def surnames() -> list[tuple[str, str]]:
    """Surnames and their language, from the lists of the `faker` package; a name of two languages is left out.

    Accents are kept, in Unicode's composed form.
    """
    lists = {language: _faker_names(locales) for language, locales in SURNAMES.items()}
    languages = Counter(name.casefold() for names in lists.values() for name in names)
    return [(name, label) for label, names in lists.items() for name in names if languages[name.casefold()] == 1]


def _faker_names(locales: dict[str, list[str]]) -> list[str]:
    names: dict[str, str] = {}
    for locale, attributes in locales.items():
        try:
            provider = importlib.import_module(f"faker.providers.person.{locale}").Provider
        except ModuleNotFoundError:
            raise DataError(
                f"{PREFIX}names needs the faker package: install it, or unrolled with its extra examples"
            ) from None
        for attribute in attributes:
            for name in getattr(provider, attribute):
                composed = unicodedata.normalize("NFC", name.strip())
                names.setdefault(composed.casefold(), composed)
    return sorted(names.values())


BUILDERS: dict[str, Callable[[], list[tuple[str, str]]]] = {"names": surnames}
