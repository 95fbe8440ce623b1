"""tools/count.py finds what it counts, and its check fails above a limit."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
import count  # noqa: E402


def commas(code):
    return len(count.comma_statements(count.tokens_of(code)))


class Counts(unittest.TestCase):
    def test_joined_expressions_are_found(self):
        self.assertEqual(commas("void f() { a = 1, b = 2; }"), 1)
        self.assertEqual(commas("void f() { if (x) f(1, 2), __syncthreads(); }"), 1)
        self.assertEqual(commas("bool f() { return ids.push_back(id), true; }"), 1)
        self.assertEqual(commas("void f() { g([&] { a += 1, b += 1; }); }"), 1)
        self.assertEqual(commas("void f() { x<T>(1), y<T, 2>(3); }"), 1)
        self.assertEqual(commas("void f() { g(a), a += int{b} * 2; }"), 1)

    def test_other_commas_are_not(self):
        for code in (
            "int a = 1, b = 2;",
            "f(a, b);",
            "for (int i = 0; i < n; ++i, ++j) f(i);",
            "const std::map<int, std::vector<std::pair<int, int>>> a = b(), c = d();",
            "T x{1, 2};",
            "f<A, B>(x);",
            "g([](int a, int b) { return a + b; });",
            "kernel<T><<<blocks, threads, 0, stream>>>(a, b);",
            "enum class E { a, b };",
            "// a, b;\nf();",
            'f("a, b;");',
            "auto [a, b] = f();",
            "R x, y;",
        ):
            self.assertEqual(commas("void f() { " + code + " }"), 0, code)

    def test_declaration_of_several_variables_is_found(self):
        packed = lambda code: len(count.packed_declarations(count.tokens_of(code)))
        for code in (
            "int a = 1, b = 2;",
            "const std::map<int, int> a = b(), c = d();",
            "R *x, *y;",
            "if (c) { static constexpr int a[2] = {1, 2}, b = 3; }",
            "int64_t a = 1,\n        b = 2;",
            "const R a = g(1,\n              2),\n        b{3};",
            "const int a = int{1} << 20,\n          b = int{2} * c;",
            "const T<R> a = T<R>{1} * x[0], b = c;",
            "struct stat a, b;",
            "if (const int a = 1, b = 2; a < b) f();",
            "switch (const int a = 1,\n        b = 2; a) {}",
            "[[maybe_unused]] int a = 1, b = 2;",
            "if (c) { g(); } [[maybe_unused]] int a, b;",
            "decltype(c) a, b;",
        ):
            self.assertEqual(packed("void f() { " + code + " }"), 1, code)
        for code in (
            "int a = f(1, 2);",
            "std::map<int, int> a;",
            "auto [a, b] = f();",
            "for (int i = 0, n = 3; i < n; ++i) f(i);",
            "for (int i = 0,\n         n = 3; i < n; ++i) f(i);",
            "for (int a = 1, b = 2; int c : d) f(c);",
            "using A = std::pair<int, int>;",
            "f(a, b);",
            "int g(int a,\n      int b);",
            "const int a = g(T{1} * 2,\n                3);",
            "T a{1,\n    2};",
            "const auto a = [&, b = 1](int c, int d) { return c; };",
            "std::function<void(int,\n                   int)> a;",
            "enum E { a,\n         b };",
            "struct A : B, C { int a; };",
            "struct A final : B<1, 2>, C<{3, 4}> {};",
            "if (const auto [a, b] = g(1, 2); a < b) f();",
            "if (c) { g(); } *a = T(1, 2);",
        ):
            self.assertEqual(packed("void f() { " + code + " }"), 0, code)

    def test_split_literal_is_found(self):
        split = lambda code: count.split_literals(count.tokens_of(code))
        self.assertEqual(split('f("the "\n  "loss");'), 1)
        self.assertEqual(split('f("One sentence. "\n  "Another one.");'), 0)

    def test_comment_that_begins_with_of_or_what_is_found(self):
        for code in (
            "// Of a step.\nint a;\n",
            "int a;\n\n  // What a step costs,\n  // in seconds.\n  int b;\n",
            "int a;  // What it is\n",
            "int a;  // the first\n// Of both.\nint b;\n",
            "#include <a>  // What is included\n",
            "// Of a.\n\n#pragma once\n",
        ):
            self.assertEqual(count.comments_without_subject(code), 1, code)
        self.assertEqual(count.comments_without_subject("// Of a.\n\n// What b is.\n"), 2)

    def test_other_comments_are_not(self):
        for code in (
            "// The cost of a step. What it\n// is not: Of a run.\n",
            "// Steps are cheap.\n// What follows is not.\n",
            "int a;  // Steps are cheap.\n        // What follows is not.\n",
            "// Offsets of a step\n// Whatever it is\n",
            'f("// Of a step");\n',
            "/* Of a step */\n",
            "auto a = R\"(\n// What it is\n)\";\n",
        ):
            self.assertEqual(count.comments_without_subject(code), 0, code)

    def test_comment_above_the_limit_fails_in_every_folder(self):
        name = "comments that begin with Of or What"
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder)
            (source / "a.cc").write_text("// What it is.\nint a;  // Of b\n")
            self.assertEqual(count.total(count.count_by_file(source))[name], 2)
            self.assertIn(name, count.above_limits(count.total(count.count_by_file(source))))
            report = list(count.report(count.count_by_file(source), {name: 2}, {name: 0}))
            self.assertEqual(report, [f"{source / 'a.cc'}: 2 {name}"])
            for other in ("bench", "tests"):
                limits = count.OTHER_LIMITS[other]
                counts = count.total(count.count_other_by_file(source))
                self.assertIn(name, count.above_limits(counts, limits))

    def test_files_are_counted_and_limits_are_checked(self):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder)
            (source / "ops/cuda").mkdir(parents=True)
            (source / "ops/rowwise/glu").mkdir(parents=True)
            (source / "ops/cuda/ptx.cuh").write_text(
                '__device__ inline void f(int) { asm("x;"); }\n'
            )
            (source / "ops/rowwise/glu/cuda.cu").write_text(
                '__device__ inline void f(int) { asm("y;"); }\n' + "//" + "-" * 99 + "\n"
            )
            counts = count.total(count.count_by_file(source))
            self.assertEqual(counts["PTX outside src/ops/cuda"], 1)
            self.assertEqual(counts["library functions defined again"], 1)
            self.assertEqual(counts["lines over 100 columns"], 1)
            self.assertEqual(counts["lines of CUDA"], 3)
            self.assertIn("PTX outside src/ops/cuda", count.above_limits(counts))
            self.assertEqual(count.above_limits(dict.fromkeys(count.LIMITS, 0)), [])


if __name__ == "__main__":
    unittest.main()
