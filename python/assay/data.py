"""Token stores: the documents that models are trained and tested on.

    store = assay.data.Store("store")
    documents = store.documents("code.test")
    documents[0]                         # token ids of the first document, its separator last
    for segment in documents.segments(512):
        ids = documents.read(segment)    # a token of context, then those to predict

docs/data.md describes the files. Everything is memory-mapped.
"""

import json
import pathlib
import typing

import numpy as np

_MAGIC = b"MMIDIDX\0\0"
_WIDTHS = {4: np.dtype("<i4"), 8: np.dtype("<u2")}


class Segment(typing.NamedTuple):
    """The tokens begin ... begin + length - 1 of a document are predicted."""

    document: int
    begin: int
    length: int


class Documents:
    """The documents of one domain and split."""

    def __init__(self, stem, separator):
        self.name = pathlib.Path(stem).name
        self.separator = separator
        self._tokens, self._begins = _read_index(pathlib.Path(f"{stem}.idx"))
        self._bytes = _numbers(f"{stem}.bytes", "<i8")
        self._sources = _numbers(f"{stem}.sources", "<i4")
        names = pathlib.Path(f"{stem}.sources.json")
        self._names = json.loads(names.read_text()) if names.exists() else []

    def __len__(self):
        return len(self._begins) - 1

    def __getitem__(self, i):
        """The token ids of document i; the last is the separator."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.name} has {len(self)} documents; there is no document {i}")
        i %= len(self)
        return self._tokens[self._begins[i] : self._begins[i + 1]]

    @property
    def tokens(self):
        """All ids, document after document."""
        return self._tokens

    def bytes(self, i):
        """UTF-8 bytes of the text of document i; None where the store does not know them."""
        return None if self._bytes is None else int(self._bytes[i])

    def source(self, i):
        """Where document i was taken from, or None."""
        if self._sources is None or self._sources[i] < 0:
            return None
        return self._names[self._sources[i]]

    def segments(self, sequence_length, max_tokens=0):
        """What an evaluation of Assay reads: pieces of at most `sequence_length` tokens.

        At most `max_tokens` tokens (0: all), so that as many documents as possible are covered: the
        first piece of every document, then the second ones, documents in a fixed pseudo-random order.
        """
        lengths = np.diff(self._begins)
        budget = max_tokens or int(lengths.sum())
        # Without a limit the order has no effect
        order = _Permutation(len(self), "held-out documents") if max_tokens else int
        open_documents = [order(i) for i in range(len(self))]
        found, used, begin = [], 0, 0
        while open_documents:
            open_documents = [i for i in open_documents if lengths[i] > begin]
            for i in open_documents:
                length = int(min(sequence_length, lengths[i] - begin))
                if used + length > budget and found:
                    return sorted(found)
                found.append(Segment(i, begin, length))
                used += length
            begin += sequence_length
        return sorted(found)

    def read(self, segment):
        """int64 ids [1 + length]: the token before the segment (the separator at the beginning of a
        document), then the tokens to predict."""
        begin = int(self._begins[segment.document]) + segment.begin
        first = self._tokens[begin - 1] if segment.begin else self.separator
        out = np.empty(segment.length + 1, np.int64)
        out[0] = first
        out[1:] = self._tokens[begin : begin + segment.length]
        return out


class Store:
    """A folder that `assay data prepare` or `assay data synth` has written."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        manifest = self.folder / "manifest.json"
        if not manifest.exists():
            raise FileNotFoundError(f"{folder} is not a token store: it has no manifest.json")
        self.manifest = json.loads(manifest.read_text())
        tokenizer = self.manifest["tokenizer"]
        self.vocab_size = tokenizer["vocab_size"]
        self.separator = tokenizer["separator"]
        self.tokenizer_sha256 = tokenizer["sha256"]
        self._splits = {}
        for part in self.manifest["parts"]:
            self._splits.setdefault(part["domain"], []).append(part["split"])

    @property
    def domains(self):
        return sorted(self._splits)

    def splits(self, domain):
        return sorted(self._splits[domain])

    @property
    def sets(self):
        """All "DOMAIN.SPLIT"."""
        return [f"{domain}.{split}" for domain in self.domains for split in self.splits(domain)]

    def documents(self, name):
        """The documents of "DOMAIN.SPLIT"."""
        if name not in self.sets:
            raise KeyError(f"{self.folder} has no '{name}'; it has {', '.join(self.sets)}")
        return Documents(self.folder / name, self.separator)

    def decode(self, ids):
        """The text of token ids. Needs the store's tokenizer.model."""
        if not hasattr(self, "_pieces"):
            self._pieces = _Pieces(self.folder / "tokenizer.model")
        return self._pieces.decode(ids)


def _numbers(path, dtype):
    path = pathlib.Path(path)
    if not path.exists() or path.stat().st_size == 0:
        return None
    return np.memmap(path, dtype, mode="r")


def _read_index(path):
    """The ids of the .bin next to it, and where each document begins (and the last one ends)."""
    raw = np.memmap(path, np.uint8, mode="r")
    if bytes(raw[:9]) != _MAGIC or int.from_bytes(bytes(raw[9:17]), "little") != 1:
        raise ValueError(f"{path} is not an index of Megatron's layout, version 1")
    if int(raw[17]) not in _WIDTHS:
        raise ValueError(f"{path} has the dtype code {raw[17]}; expected 4 (int32) or 8 (uint16)")
    width = _WIDTHS[int(raw[17])]
    sequences, documents = np.frombuffer(raw[18:34], "<u8")
    offset = 34
    lengths = np.frombuffer(raw, "<i4", int(sequences), offset)
    offset += 12 * int(sequences)  # the lengths, then the byte offsets
    first = np.frombuffer(raw, "<i8", int(documents), offset)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    bin_file = path.with_suffix(".bin")
    tokens = np.memmap(bin_file, width, mode="r") if ends[-1] else np.empty(0, width)
    if len(tokens) != ends[-1]:
        raise ValueError(f"{bin_file} has {len(tokens)} tokens, and its index says {ends[-1]}")
    return tokens, ends[first]


class _Permutation:
    """That of src/base/random.h with seed 0: a Feistel network of Philox blocks."""

    def __init__(self, size, purpose):
        self.size = size
        hash_ = 0xCBF29CE484222325
        for byte in purpose.encode():
            hash_ = (hash_ ^ byte) * 0x100000001B3 % 2**64
        self.key = hash_ * 0x9E3779B97F4A7C15 % 2**64
        self.half_bits = 1
        while 1 << (2 * self.half_bits) < size:
            self.half_bits += 1

    def _first_word(self, high, low):
        x = [low % 2**32, low >> 32, high % 2**32, high >> 32]
        k0, k1 = self.key % 2**32, self.key >> 32
        for _ in range(10):
            a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
            x = [b >> 32 ^ x[1] ^ k0, b % 2**32, a >> 32 ^ x[3] ^ k1, a % 2**32]
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        return x[0]

    def __call__(self, index):
        mask = (1 << self.half_bits) - 1
        while True:
            left, right = index >> self.half_bits, index & mask
            for turn in range(4):
                left, right = right, left ^ (self._first_word(turn, right) & mask)
            index = left << self.half_bits | right
            if index < self.size:
                return index


class _Pieces:
    """The pieces of a SentencePiece model, which is a protocol buffer, for decoding."""

    def __init__(self, path):
        if not path.exists():
            raise FileNotFoundError(f"{path}: the store has no tokenizer, so its ids have no text")
        self.bytes = []  # of each id
        self.dummy_prefix = True
        for field, value in _fields(path.read_bytes()):
            if field == 1:
                self.bytes.append(self._text(dict(_fields(value))))
            elif field == 3:
                self.dummy_prefix = bool(dict(_fields(value)).get(3, 1))

    @staticmethod
    def _text(piece):
        kind, text = piece.get(3, 1), piece.get(1, b"").decode()
        if kind == 6:  # a byte, "<0x0A>"
            return bytes([int(text[3:5], 16)])
        if kind in (2, 3):  # unknown, control
            return b""
        return text.replace("\u2581", " ").encode()

    def decode(self, ids):
        text = b"".join(self.bytes[i] for i in ids)
        if self.dummy_prefix:
            text = text.removeprefix(b" ")
        return text.decode(errors="replace")


def _fields(message):
    """(number, value) of the fields of a protocol buffer."""

    def varint(at):
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at

    at = 0
    while at < len(message):
        key, at = varint(at)
        kind = key & 7
        if kind == 0:
            value, at = varint(at)
        else:
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = varint(at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value
