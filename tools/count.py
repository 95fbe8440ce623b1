#!/usr/bin/env python3
"""Counts what the style rules forbid in the C++ and CUDA sources of a folder.

    tools/count.py [FOLDER]     prints the counts of FOLDER (default: src)
    tools/count.py --check      fails if a count of src is above its limit below

A change that lowers a count lowers its limit in LIMITS in the same commit.
"""

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS = 100

# The largest allowed count of src; None: the count is printed and has no limit.
LIMITS = {
    "comma statements": 0,
    "declarations of several variables": 0,
    "lines over 100 columns": 0,
    "split string literals": 0,
    "comments that begin with Of or What": 0,
    "PTX outside src/ops/cuda": 0,
    "library functions defined again": 0,
    "lines of CUDA": None,
    "lines of src/ops": None,
    "lines of src": None,
}

# The limits of bench, tests and tools. Long lines are counted in Python and shell scripts, too.
NO_LONG_LINES = {"lines over 100 columns": 0, "split string literals": 0}
CODE_LIMITS = {
    **NO_LONG_LINES,
    "comma statements": 0,
    "comments that begin with Of or What": 0,
    "declarations of several variables": 0,
}
OTHER_LIMITS = {
    "bench": CODE_LIMITS,
    "tests": CODE_LIMITS,
    "tools": NO_LONG_LINES,
}

TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<directive>^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*)
      | (?P<raw>R"(?P<mark>[^()\s]*)\(.*?\)(?P=mark)")
      | (?P<string>(?:u8|[uUL])?"(?:[^"\\\n]|\\.)*")
      | (?P<char>'(?:[^'\\\n]|\\.)+')
      | (?P<number>\.?\d(?:[\w.']|[eEpP][+-])*)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<mark2><<<|>>>|::|->|\+\+|--|&&|\|\||<<=|>>=|<=|>=|==|!=|[-+*/%&|^]=|\S)""",
    re.S | re.M | re.X,
)
OPEN = {"(": ")", "[": "]", "{": "}", "<<<": ">>>"}  # <<<…>>>: the launch of a kernel
CLOSE = {closing: opening for opening, closing in OPEN.items()}
# A statement that begins with one of these is not an expression.
DECLARES = set(
    """alignas auto bool case char class const constexpr consteval constinit decltype default double
    enum explicit extern float friend goto inline int int16_t int32_t int64_t int8_t long mutable
    namespace operator private protected public register short signed size_t static static_assert
    struct template thread_local typedef typename uint16_t uint32_t uint64_t uint8_t union unsigned
    using virtual void volatile __device__ __global__ __host__ __shared__ __constant__
    asm""".split()
)
# A declaration that begins with one of these declares no variable.
NO_VARIABLE = set(
    """asm friend goto namespace private protected public static_assert template typedef
    using""".split()
)
CLASS_KEYS = {"class", "enum", "struct", "union"}
# An expression continues past a } if one of these follows.
PAST_BRACE = set(", . ) ; ( ] [ ? : + ->".split())
CONTROL = {"if", "for", "while", "switch"}


class Token:
    def __init__(self, kind, text, begin, end):
        self.kind, self.text, self.begin, self.end = kind, text, begin, end


def tokens_of(text):
    """Tokens without comments. A preprocessor directive is one token."""
    found = []
    for match in TOKEN.finditer(text):
        kind = match.lastgroup if match.lastgroup != "mark" else "raw"
        if kind != "comment":
            found.append(Token(kind, match.group(), match.start(), match.end()))
    return found


def partners(tokens):
    """The index of the other bracket for every bracket."""
    stack, partner = [], {}
    for i, token in enumerate(tokens):
        if token.kind != "mark2":
            continue
        if token.text in OPEN:
            stack.append(i)
        elif token.text in CLOSE and stack and tokens[stack[-1]].text == CLOSE[token.text]:
            partner[i] = stack.pop()
            partner[partner[i]] = i
    return partner


def is_attribute(tokens, i):
    return tokens[i].text == tokens[i + 1].text == "["


def body_of_control(tokens, partner, i, end):
    """The first token of the statement of i, past `if (…)`, `else`, `case x:`, `[[…]]`, …"""
    while i < end:
        text = tokens[i].text
        if tokens[i].kind == "directive" or text in ("else", "do"):
            i += 1
        elif is_attribute(tokens, i) and i in partner:
            i = partner[i] + 1
        elif text in CONTROL:
            i += 1
            if tokens[i].text == "constexpr":
                i += 1
            if tokens[i].text != "(" or i not in partner:
                return i
            i = partner[i] + 1
        elif text == "case" or (text == "default" and tokens[i + 1].text == ":"):
            while i < end and tokens[i].text != ":":
                i += 1
            i += 1
        elif (
            tokens[i].kind == "word"
            and i + 1 < end
            and tokens[i + 1].text == ":"
            and text in ("public", "private", "protected")
        ):
            i += 2
        else:
            break
    return i


def angle_end(tokens, i, end):
    """The index past `<…>` if token i opens template arguments, else i."""
    depth = 0
    for j in range(i, min(end, i + 60)):
        text = tokens[j].text
        if text == "<":
            depth += 1
        elif text in (">", ">>>"):
            depth -= len(text)
            if depth <= 0:
                return j + 1
        elif text in (";", "&&", "||", "=", "?") or tokens[j].kind == "string":
            return i
    return i


def is_declaration(tokens, partner, i, end):
    if tokens[i].text in DECLARES:
        return True
    if tokens[i].kind != "word" or tokens[i].text in ("return", "throw", "delete"):
        return False
    while i < end:  # a type: a::b<c>::d
        i += 1
        if i < end and tokens[i].text == "<":
            i = angle_end(tokens, i, end)
        if i < end and tokens[i].text == "::":
            i += 1
            continue
        break
    while i < end and tokens[i].text in ("*", "&", "&&", "const"):
        i += 1
    return i < end and tokens[i].kind == "word" and tokens[i - 1].text not in ("::", ".", "->")


def statements(tokens, partner):
    """(first, last) of every statement that ends with a semicolon, past its control header.

    The header of a for statement is none.
    """
    in_for = set()
    for i, token in enumerate(tokens):
        if token.text == "for" and i + 1 in partner:
            in_for.update(
                k
                for k in range(i + 2, partner[i + 1])
                if tokens[k].text == ";" and enclosing(tokens, partner, k) == i + 1
            )
    for last, token in enumerate(tokens):
        if token.text != ";" or token.kind != "mark2" or last in in_for:
            continue
        i = last - 1
        while i >= 0:
            text = tokens[i].text
            if tokens[i].kind == "directive" or (tokens[i].kind == "mark2" and text in ";{(["):
                break
            if text in CLOSE and tokens[i].kind == "mark2" and i in partner:
                if text == "}" and not continues_past_brace(tokens, partner, i):
                    break
                i = partner[i]
            i -= 1
        first = body_of_control(tokens, partner, i + 1, last)
        if first < last:
            yield first, last


def commas_between(tokens, partner, first, last, follows_template):
    """Commas outside of brackets. `follows_template`: what may follow template arguments."""
    commas, k = [], first
    while k < last:
        text = tokens[k].text
        if tokens[k].kind == "mark2" and text in OPEN and k in partner:
            k = partner[k]
        elif text == "<" and tokens[k - 1].kind == "word":
            past = angle_end(tokens, k, last)
            if past > k and follows_template(tokens[past]):
                k = past - 1
        elif text == "," and tokens[k].kind == "mark2":
            commas.append(k)
        k += 1
    return commas


def comma_statements(tokens):
    """(first, last, commas): token indices of every statement that joins expressions with commas.

    `last` is the semicolon. `return a, b;` is one too.
    """
    partner, found = partners(tokens), []
    follows = lambda token: token.text in ("(", "::", "{", ")", ",")
    for first, last in statements(tokens, partner):
        if is_declaration(tokens, partner, first, last):
            continue
        commas = commas_between(tokens, partner, first, last, follows)
        if commas:
            found.append((first, last, commas))
    return found


def past_class_body(tokens, partner, first, last):
    """The first token past the base classes and the body of a class, or `first` without a body."""
    if tokens[first].text in CLASS_KEYS:
        for i in range(first, last):
            if tokens[i].text == "{" and i in partner:
                return partner[i] + 1
    return first


def packed_declarations(tokens):
    """(first, last, commas) of every declaration of several variables."""
    partner, found = partners(tokens), []
    for first, last in statements(tokens, partner):
        if tokens[first].text in NO_VARIABLE:
            continue
        if is_declaration(tokens, partner, first, last):
            begin = past_class_body(tokens, partner, first, last)
            commas = commas_between(tokens, partner, begin, last, lambda token: True)
            if commas:
                found.append((first, last, commas))
    return found


def enclosing(tokens, partner, i):
    while i > 0:
        i -= 1
        if tokens[i].kind == "mark2" and tokens[i].text in CLOSE and i in partner:
            i = partner[i]
        elif tokens[i].kind == "mark2" and tokens[i].text in OPEN:
            return i
    return -1


def continues_past_brace(tokens, partner, i):
    """Whether the } at i belongs to an expression: of a lambda or a braced initialiser.

    An initialiser touches the name of its type or variable. A space precedes the { of a block.
    """
    before, after = tokens[partner[i] - 1], tokens[i + 1]
    if before.end == tokens[partner[i]].begin and (before.kind == "word" or before.text in ">]"):
        return True
    return after.text in PAST_BRACE and not is_attribute(tokens, i + 1)


def split_literals(tokens):
    """String literals that continue on another line in the middle of a sentence."""
    count = 0
    for before, after in zip(tokens, tokens[1:]):
        if before.kind == after.kind == "string":
            text = before.text[1:-1].rstrip(" ")
            count += not text.endswith((".", ":", ";", "!", "?", "\\n", ","))
    return count


WITHOUT_SUBJECT = re.compile(r"//+[ \t]*(?:Of|What)\b")


def line_comments(text):
    """The offsets of all // comments."""
    for match in TOKEN.finditer(text):
        if match.lastgroup == "comment" and match.group().startswith("//"):
            yield match.start()
        elif match.lastgroup == "directive":
            trailing = re.search(r"[ \t](?=//)", match.group())
            if trailing:
                yield match.start() + trailing.end()


def comments_without_subject(text):
    """Comments that begin with Of or What.

    A comment continues on the next line if that line has a // in the same column.
    """
    count, previous = 0, None
    for offset in line_comments(text):
        line = text.count("\n", 0, offset)
        column = offset - text.rfind("\n", 0, offset)
        begins = previous != (line - 1, column)
        count += begins and bool(WITHOUT_SUBJECT.match(text, offset))
        previous = (line, column)
    return count


def asm_statements(tokens, text):
    """Inline assembly with an instruction; an empty one is a fence for the compiler."""
    count = 0
    for i, token in enumerate(tokens):
        if token.text == "asm":
            literal = next((t for t in tokens[i : i + 4] if t.kind == "string"), None)
            count += literal is None or literal.text != '""'
    return count


FREE_DEVICE_FUNCTION = re.compile(
    r"^(?:__host__ )?__device__ (?:inline |constexpr )*[\w:<>, ]+?[ &*](\w+)\(", re.M
)


def sources(folder):
    return sorted(f for f in folder.rglob("*") if f.suffix in (".h", ".cc", ".cu", ".cuh"))


def counts_of(file, folder, library):
    """The counts of one file of C++ or CUDA below `folder`."""
    text = file.read_text()
    tokens, lines = tokens_of(text), text.splitlines()
    counts = dict.fromkeys(LIMITS, 0)
    counts["comma statements"] = len(comma_statements(tokens))
    counts["declarations of several variables"] = len(packed_declarations(tokens))
    counts["lines over 100 columns"] = sum(len(line) > COLUMNS for line in lines)
    counts["comments that begin with Of or What"] = comments_without_subject(text)
    counts["lines of src"] = len(lines)
    if file.suffix in (".cu", ".cuh"):
        counts["lines of CUDA"] = len(lines)
        if file.parent.parts[-2:] != ("ops", "cuda"):
            counts["PTX outside src/ops/cuda"] = asm_statements(tokens, text)
            counts["library functions defined again"] = sum(
                name in library for name in FREE_DEVICE_FUNCTION.findall(text)
            )
    else:
        counts["split string literals"] = split_literals(tokens)
    if "ops" in file.relative_to(folder).parts[:1]:
        counts["lines of src/ops"] = len(lines)
    return counts


def count_by_file(folder):
    library = set()
    for file in sources(folder):
        if file.parent.parts[-2:] == ("ops", "cuda"):
            library.update(FREE_DEVICE_FUNCTION.findall(file.read_text()))
    return {file: counts_of(file, folder, library) for file in sources(folder)}


def total(by_file):
    return {name: sum(counts[name] for counts in by_file.values()) for name in LIMITS}


def is_script(file):
    return file.suffix in (".py", ".sh") or (not file.suffix and file.read_bytes()[:2] == b"#!")


def count_other_by_file(folder):
    by_file = count_by_file(folder)
    for file in folder.rglob("*"):
        if file.is_file() and is_script(file):
            lines = file.read_text().splitlines()
            by_file[file] = dict.fromkeys(LIMITS, 0)
            by_file[file]["lines over 100 columns"] = sum(len(line) > COLUMNS for line in lines)
    return by_file


def above_limits(counts, limits=LIMITS):
    return [name for name, limit in limits.items() if limit is not None and counts[name] > limit]


def report(by_file, counts, limits):
    """What is above its limit, with the files that have it."""
    for name in above_limits(counts, limits):
        for file, own in by_file.items():
            if own[name]:
                yield f"{file}: {own[name]} {name}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "src")
    parser.add_argument("--check", action="store_true", help="fail if a count is above its limit")
    arguments = parser.parse_args()
    by_file = count_by_file(arguments.folder)
    counts = total(by_file)
    above = list(report(by_file, counts, LIMITS))
    for name, number in counts.items():
        limit = f" (limit {LIMITS[name]})" if arguments.check and LIMITS[name] is not None else ""
        print(f"{number:6}  {name}{limit}")
    if not counts["lines of src"]:
        sys.exit(f"{arguments.folder} has no sources")
    for name, limits in OTHER_LIMITS.items() if arguments.check else ():
        by_file = count_other_by_file(ROOT / name)
        counts = total(by_file)
        for what, limit in limits.items():
            print(f"{counts[what]:6}  {what}, {name} (limit {limit})")
        above += report(by_file, counts, limits)
    if above and arguments.check:
        sys.exit("above the limits of tools/count.py:\n" + "\n".join(above))


if __name__ == "__main__":
    main()
