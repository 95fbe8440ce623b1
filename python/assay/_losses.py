"""The losses of any causal language model, for `assay judge`."""

import collections
import json
import os

import torch

from .data import Store

# Tokens [context, predicted...] of one row, and the document that it counts for
_Row = collections.namedtuple("_Row", "document tokens")


class _Sums:
    def __init__(self):
        self.nats, self.tokens, self.recall_nats, self.recall_tokens = 0.0, 0, 0.0, 0


def _repeated(tokens):
    """Of each predicted token, whether it followed the token before it earlier in this row."""
    seen, found = set(), []
    for bigram in zip(tokens[:-1], tokens[1:]):
        found.append(bigram in seen)
        seen.add(bigram)
    return torch.tensor(found)


def _rows_of_store(documents, length, max_tokens):
    for segment in documents.segments(length, max_tokens):
        yield _Row(segment.document, documents.read(segment).tolist())


def _rows_of_text(store, documents, tokenizer, length, max_tokens):
    """The same documents in the tokens of another tokenizer."""
    first = tokenizer.bos_token_id
    if first is None:
        first = tokenizer.eos_token_id
    used = 0
    for document in range(len(documents)):
        text = store.decode(documents[document][:-1])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if first is not None:
            ids = [first, *ids]
        for begin in range(0, len(ids) - 1, length):
            yield _Row(document, ids[begin : begin + length + 1])
        used += len(ids)
        if max_tokens and used >= max_tokens:
            return


@torch.no_grad()
def _evaluate(model, rows, device, tokens_at_once):
    rows = sorted(rows, key=lambda row: -len(row.tokens))
    sums = collections.defaultdict(_Sums)
    begin = 0
    while begin < len(rows):
        longest = len(rows[begin].tokens)
        batch = rows[begin : begin + max(1, tokens_at_once // longest)]
        begin += len(batch)
        # Shorter rows end in id 0; what a causal model says there is not read
        padded = torch.zeros(len(batch), longest, dtype=torch.long)
        for i, row in enumerate(batch):
            padded[i, : len(row.tokens)] = torch.tensor(row.tokens)
        padded = padded.to(device)
        out = model(padded[:, :-1])
        logits = getattr(out, "logits", out)
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != padded[:, :-1].shape:
            raise ValueError(
                "the model must return logits [B, T, V], or an object with .logits; it returns "
                f"{list(logits.shape) if isinstance(logits, torch.Tensor) else type(out).__name__}"
            )
        nats = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
            padded[:, 1:].flatten(), reduction="none"
        )
        nats = nats.view(len(batch), -1).double().cpu()
        for i, row in enumerate(batch):
            own, recall = nats[i, : len(row.tokens) - 1], _repeated(row.tokens)
            if not own.isfinite().all():
                raise ValueError(f"the loss of document {row.document} is not finite")
            s = sums[row.document]
            s.nats += own.sum().item()
            s.tokens += len(own)
            s.recall_nats += own[recall].sum().item()
            s.recall_tokens += int(recall.sum())
    return sums


def _default_sets(store):
    trained = [domain for domain in store.domains if "train" in store.splits(domain)]
    held_out = [f"{domain}.valid" for domain in trained if "valid" in store.splits(domain)]
    others = [f"{d}.test" for d in store.domains if d not in trained and "test" in store.splits(d)]
    return held_out, others


def losses(
    model,
    tokenizer,
    store,
    output=None,
    *,
    name="model",
    seed=0,
    tokens=0,
    epochs=None,
    training_loss=None,
    held_out=None,
    out_of_domain=None,
    sequence_length=512,
    max_tokens=0,
    tokens_at_once=1 << 14,
):
    """The losses of a causal language model on the documents of a token store.

    model: takes ids [B, T] and returns logits [B, T, V], or an object with `.logits`, such as a
        model of transformers. It is not changed; call model.eval() first.
    tokenizer: that of the model, as in transformers; its tokens are made from the text of the
        store. None: the model reads the tokens of the store.
    store: an assay.data.Store, or its folder.
    output: the file to write, JSON Lines for `assay judge`.
    name, seed, tokens, epochs, training_loss: of the run: name of the model, seed, training tokens,
        epochs, mean training loss of its last steps in nats per token.
    held_out, out_of_domain: lists of "DOMAIN.SPLIT". By default the split valid of every domain
        that has a train split, and the split test of every other domain.
    sequence_length: tokens of context at most. max_tokens: per set, 0 for all.

    A recall target is a token that followed the token before it earlier in the same context; its
    losses are summed apart. Returns the lines: the run, then one dict per document.
    """
    store = store if isinstance(store, Store) else Store(store)
    defaults = _default_sets(store)
    sets = {
        "held_out": defaults[0] if held_out is None else held_out,
        "out_of_domain": defaults[1] if out_of_domain is None else out_of_domain,
    }
    if not any(sets.values()):
        raise ValueError(
            f"{store.folder} has no valid split of a trained domain and no test split of another: "
            f"give held_out and out_of_domain; there are {', '.join(store.sets)}"
        )
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    device = parameters[0].device if parameters else torch.device("cpu")
    identity = store.tokenizer_sha256 if tokenizer is None else tokenizer.name_or_path
    run = {
        "model": name,
        "seed": seed,
        "tokens": tokens,
        "epochs": epochs,
        "training_loss": training_loss,
        "parameters": sum(p.numel() for p in parameters),
        "tokenizer": identity,
    }
    lines = [{"run": {key: value for key, value in run.items() if value is not None}}]
    for role, names in sets.items():
        for set_name in names:
            documents = store.documents(set_name)
            if tokenizer is None:
                rows = _rows_of_store(documents, sequence_length, max_tokens)
            else:
                rows = _rows_of_text(store, documents, tokenizer, sequence_length, max_tokens)
            sums = _evaluate(model, rows, device, tokens_at_once)
            for document in sorted(sums):
                lines.append(_line(role, set_name, documents, document, sums[document], tokenizer))
    if output is not None:
        partial = f"{output}.tmp"
        with open(partial, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        os.replace(partial, output)
    return lines


def _line(role, set_name, documents, document, sums, tokenizer):
    line = {
        "role": role,
        "domain": set_name.rpartition(".")[0],
        "document": document,
        "nats": sums.nats,
        "tokens": sums.tokens,
        "recall_nats": sums.recall_nats,
        "recall_tokens": sums.recall_tokens,
    }
    if documents.source(document) is not None:
        line["source"] = documents.source(document)
    if documents.bytes(document) is not None:
        # In proportion, where only a part of the document was read
        whole = len(documents[document]) if tokenizer is None else sums.tokens
        line["bytes"] = round(documents.bytes(document) * sums.tokens / whole)
    return line
