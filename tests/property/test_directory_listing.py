"""A directory store lists as S3 would: by the bytes of the whole key, whatever the folders."""

import tempfile

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiphys.store import DirectoryStore

# Around "/" (0x2f) lie the characters that a folder-by-folder walk puts in the wrong place.
part = st.text(alphabet=["a", "b", "A", "-", "!", ".", "0", "~", "é", "日", " "], min_size=1, max_size=3).filter(
    lambda text: text not in (".", "..")
)
key = st.lists(part, min_size=1, max_size=4).map("/".join)
objects = st.dictionaries(key, st.binary(max_size=3), max_size=12)
prefix = st.one_of(key, key.map(lambda text: text + "/"), key.map(lambda text: text[:-1]), st.just(""))


def is_storable(keys: list[str]) -> bool:
    """On a file system no key may be a folder of another."""
    return not any(longer.startswith(f"{shorter}/") for shorter in keys for longer in keys)


@settings(max_examples=60)
@given(objects, prefix)
def test_listing_equals_a_sorted_dictionary(content: dict[str, bytes], start: str) -> None:
    assume(is_storable(list(content)))
    oracle = [(k, len(content[k])) for k in sorted(content, key=str.encode) if k.startswith(start)]

    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(folder)
        for name, data in content.items():
            store.create(name, data)

        assert [info[:2] for info in store.list(start)] == oracle


@settings(max_examples=60)
@given(objects, prefix)
def test_prefixes_equal_the_cut_keys_of_a_sorted_dictionary(content: dict[str, bytes], start: str) -> None:
    assume(is_storable(list(content)))
    below = (k[len(start) :] for k in content if k.startswith(start))
    oracle = sorted({start + rest.partition("/")[0] + "/" for rest in below if "/" in rest}, key=str.encode)

    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(folder)
        for name, data in content.items():
            store.create(name, data)

        assert list(store.prefixes(start)) == oracle


@settings(max_examples=60)
@given(objects, st.data())
def test_deletion_leaves_the_rest(content: dict[str, bytes], data: st.DataObject) -> None:
    assume(content and is_storable(list(content)))
    gone = data.draw(st.lists(st.sampled_from(sorted(content)), max_size=6))

    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(folder)
        for name, value in content.items():
            store.create(name, value)
        for name in gone:
            store.delete(name)

        assert {info.key: store.read(info.key) for info in store.list("")} == {
            name: value for name, value in content.items() if name not in gone
        }
