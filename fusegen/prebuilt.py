"""Prebuilt: where a compiler is missing, what was built with one serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusegen import cache

MISSING = "missing"  # of a compiler's version


def entry_of(
    about: tuple[str, str, str], texts: Sequence[str], facts: Mapping[str, str]
) -> cache.Entry:
    """The entry of a module of these texts and facts, about whose chain its text, its hash and the
    target are told. Where facts are missing, it is that of a build in the cache which differs in
    nothing else, if there is such.
    """

    def made(facts: Mapping[str, str]) -> cache.Entry:
        key = cache.build_key(*texts, *facts, *facts.values())
        return cache.Entry(*about, key, facts)

    entry = made(facts)
    if MISSING not in facts.values():
        return entry
    known = {name: fact for name, fact in facts.items() if fact != MISSING}
    for path in sorted(entry.directory(cache.cache_root()).parent.glob("*")):
        manifest = cache.read_manifest(path)
        built_with = {} if manifest is None else manifest.fingerprint
        is_alike = built_with.keys() == facts.keys() and known.items() <= built_with.items()
        if is_alike and path.name == (found := made(built_with)).key:
            return found
    return entry
