"""tools/corpus on a repository that the test makes: documents, checksums, continuation."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parent.parent / "tools" / "corpus"
HEADER = "domain\tsplit\trepository\tcommit\tpattern\tlicence\tsha256\n"
LONG = "A sentence of the text. " * 20
FILES = {
    "a/one.md": f"{LONG}\r\nsecond\rthird\n".encode(),
    "b.md": ("\ufeff" + LONG).encode(),
    "short.md": b"too short",
    "large.md": b"x" * 1_000_001,
    "latin.md": ("\u00e9" * 300).encode("latin-1"),
    "binary.md": b"\0" * 300,
    "code.py": LONG.encode(),
}


def git(folder, *arguments):
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    command = ["git", *identity, "-C", folder, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Corpus(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        root = pathlib.Path(temporary.name)
        self.table = root / "table.tsv"
        self.out = root / "out"
        self.host = root / "host"
        self.repository = self.host / "owner" / "name"
        self.repository.mkdir(parents=True)
        git(self.repository, "init", "--quiet")
        for path, content in FILES.items():
            (self.repository / path).parent.mkdir(exist_ok=True)
            (self.repository / path).write_bytes(content)
        (self.repository / "link.md").symlink_to("b.md")
        git(self.repository, "add", "-A")
        git(self.repository, "commit", "--quiet", "-m", "one")
        commit = git(self.repository, "rev-parse", "HEAD")
        row = f"c4\ttrain\towner/name\t{commit}\t.*\\.md\tMIT\t-\n"
        self.table.write_text(HEADER + row)

    def run_tool(self, *options, code=0):
        command = [sys.executable, TOOL, self.out, "--table", self.table, "--host", self.host]
        result = subprocess.run([*command, *options], capture_output=True, text=True)
        self.assertEqual(result.returncode, code, result.stderr)
        return result.stderr

    def documents(self):
        text = (self.out / "c4.train.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def test_matching_text_files_are_documents(self):
        self.run_tool("--update")
        meta = {"redpajama_set_name": "RedPajamaC4", "source": "owner/name"}
        texts = [f"{LONG}\nsecond\nthird\n", LONG]
        self.assertEqual(self.documents(), [{"text": text, "meta": meta} for text in texts])

    def test_updated_table_verifies_without_the_host(self):
        self.run_tool("--update")
        self.host.rename(self.host.with_name("gone"))
        self.assertNotIn("download", self.run_tool())

    def test_wrong_checksum_writes_nothing(self):
        self.assertIn("owner/name: sha256", self.run_tool(code=1))
        self.assertFalse((self.out / "c4.train.jsonl").exists())

    def test_later_commit_changes_nothing(self):
        self.run_tool("--update")
        (self.repository / "b.md").write_text(LONG + "changed")
        git(self.repository, "commit", "--quiet", "-a", "-m", "two")
        subprocess.run(["rm", "-r", self.out], check=True)
        self.run_tool()
        self.assertEqual(self.documents()[1]["text"], LONG)

    def test_unknown_commit_is_an_error(self):
        text = self.table.read_text().split("\t")
        text[9] = "0" * 40
        self.table.write_text("\t".join(text))
        self.assertIn("git fetch", self.run_tool(code=1))


if __name__ == "__main__":
    unittest.main()
