"""`assay serve` as the official Python client of OpenAI sees it.

Usage: openai_client_test.py PROGRAM FOLDER    FOLDER/run: see small_model.sh
"""
import asyncio
import json
import pathlib
import sys
import time
import unittest
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
from served import Server

try:
    import openai
except ImportError as error:
    print(f"skipped: {error}; tools/setup installs the package openai into .venv")
    sys.exit(77)

PROGRAM, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
KEY = "a key"
ENDLESS = {"prompt": "A", "max_tokens": 20000, "extra_body": {"ignore_eos": True}}


def client_of(server, **options):
    options = {"api_key": KEY, "max_retries": 0, "timeout": 60, **options}
    return openai.OpenAI(base_url=server.url + "/v1", **options)


def metric(server, name):
    request = urllib.request.Request(server.url + "/metrics",
                                     headers={"Authorization": f"Bearer {KEY}"})
    for line in urllib.request.urlopen(request).read().decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])


def wait_for(condition):
    while not condition():
        time.sleep(0.01)


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(PROGRAM, FOLDER / "run", "--threads", 1, "--api-key", KEY, "--slots", 2)
        cls.client = client_of(cls.server)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        assert cls.server.stop() == 0

    def complete(self, prompt="The server", **options):
        options = {"max_tokens": 12, "seed": 3, **options}
        return self.client.completions.create(model="run", prompt=prompt, **options)

    def test_models_are_listed(self):
        models = list(self.client.models.list())
        self.assertEqual([model.id for model in models], ["run"])
        self.assertEqual(models[0].object, "model")
        self.assertGreater(models[0].created, 1_700_000_000)

    def test_model_is_found_by_its_name(self):
        self.assertEqual(self.client.models.retrieve("run").id, "run")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.models.retrieve("gpt")
        self.assertIn("'run'", caught.exception.message)

    def test_fields_of_a_completion_have_their_types(self):
        answer = self.complete()
        self.assertIsInstance(answer, openai.types.Completion)
        self.assertEqual(answer.object, "text_completion")
        self.assertEqual(answer.choices[0].finish_reason, "length")
        self.assertIsNone(answer.choices[0].logprobs)
        self.assertEqual(answer.usage.completion_tokens, 12)
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + 12)

    def test_seed_repeats_an_answer(self):
        first = self.complete(max_tokens=30).choices[0].text
        self.assertEqual(self.complete(max_tokens=30).choices[0].text, first)
        self.assertNotEqual(self.complete(max_tokens=30, seed=4).choices[0].text, first)

    def test_n_gives_the_answers_of_consecutive_seeds(self):
        texts = [choice.text for choice in self.complete(n=3).choices]
        self.assertEqual(texts, [self.complete(seed=3 + i).choices[0].text for i in range(3)])

    def test_several_prompts_are_answered_in_order(self):
        answer = self.complete(prompt=["The model", "A token"], temperature=0)
        self.assertEqual([choice.index for choice in answer.choices], [0, 1])
        alone = [self.complete(prompt=prompt, temperature=0).choices[0].text
                 for prompt in ("The model", "A token")]
        self.assertEqual([choice.text for choice in answer.choices], alone)

    def test_stop_ends_the_text_before_it(self):
        whole = self.complete(max_tokens=40).choices[0].text
        stop = whole[10:12]
        choice = self.complete(max_tokens=40, stop=[stop, "never in the text"]).choices[0]
        self.assertEqual(choice.text, whole[:whole.index(stop)])
        self.assertEqual(choice.finish_reason, "stop")

    def test_echo_with_logprobs_scores_the_prompt(self):
        choice = self.complete(prompt="The server reads prompts.", max_tokens=0, echo=True,
                               logprobs=2).choices[0]
        self.assertEqual(choice.text, "The server reads prompts.")
        scores = choice.logprobs
        self.assertEqual("".join(scores.tokens), "The server reads prompts.")
        self.assertIsNone(scores.token_logprobs[0])
        self.assertTrue(all(value < 0 for value in scores.token_logprobs[1:]))
        self.assertTrue(all(2 <= len(top) <= 3 for top in scores.top_logprobs[1:]))
        self.assertEqual(scores.text_offset[0], 0)

    def test_stream_is_the_whole_answer_in_pieces(self):
        whole = self.complete(max_tokens=40, n=2)
        texts, reasons, usage = ["", ""], [None, None], None
        with self.complete(max_tokens=40, n=2, stream=True,
                           stream_options={"include_usage": True}) as stream:
            for event in stream:
                usage = event.usage or usage
                for choice in event.choices:
                    texts[choice.index] += choice.text
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        self.assertEqual(texts, [choice.text for choice in whole.choices])
        self.assertEqual(reasons, [choice.finish_reason for choice in whole.choices])
        self.assertEqual(usage, whole.usage)

    def test_closed_stream_frees_its_place(self):
        before = metric(self.server, "assay_requests_cancelled_total")
        stream = self.client.completions.create(model="run", stream=True, **ENDLESS)
        self.assertTrue(next(iter(stream)).choices)
        wait_for(lambda: metric(self.server, "assay_sequences_decoding") == 1)
        stream.close()
        wait_for(lambda: metric(self.server, "assay_requests_cancelled_total") == before + 1)
        wait_for(lambda: metric(self.server, "assay_sequences_decoding") == 0)

    def test_cancelled_task_frees_its_place(self):
        before = metric(self.server, "assay_requests_cancelled_total")

        async def begin_and_cancel():
            async with openai.AsyncOpenAI(api_key=KEY, base_url=self.server.url + "/v1",
                                          max_retries=0) as client:
                task = asyncio.create_task(client.completions.create(model="run", **ENDLESS))
                while metric(self.server, "assay_sequences_decoding") == 0:
                    await asyncio.sleep(0.01)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task

        asyncio.run(begin_and_cancel())
        wait_for(lambda: metric(self.server, "assay_requests_cancelled_total") == before + 1)

    def test_concurrent_requests_get_the_answers_of_requests_alone(self):
        alone = [self.complete(seed=i, max_tokens=20).choices[0].text for i in range(8)]

        async def ask_all():
            async with openai.AsyncOpenAI(api_key=KEY, base_url=self.server.url + "/v1",
                                          max_retries=0) as client:
                return await asyncio.gather(*(
                    client.completions.create(model="run", prompt="The server", seed=i,
                                              max_tokens=20) for i in range(8)))

        self.assertEqual([answer.choices[0].text for answer in asyncio.run(ask_all())], alone)

    def test_bad_request_names_the_field(self):
        wrong = {"max_tokens": -1, "temperature": -2, "top_p": 2, "n": 0, "logprobs": 21,
                 "stop": [""], "prompt": [99999], "suffix": "end"}
        for field, value in wrong.items():
            with self.assertRaises(openai.BadRequestError) as caught:
                self.complete(**{field: value})
            self.assertIn(field, caught.exception.message)
            self.assertEqual(caught.exception.type, "invalid_request_error")

    def test_unknown_field_is_refused_with_the_nearest_name(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.complete(extra_body={"max_token": 3})
        self.assertEqual(caught.exception.param, "max_token")
        self.assertIn("max_tokens", caught.exception.message)

    def test_wrong_key_raises_authentication_error(self):
        with client_of(self.server, api_key="another") as client:
            with self.assertRaises(openai.AuthenticationError) as caught:
                client.models.list()
        self.assertEqual(caught.exception.code, "invalid_api_key")

    def test_other_model_raises_not_found_error(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.completions.create(model="gpt", prompt="A")
        self.assertEqual(caught.exception.code, "model_not_found")

    def test_chat_raises_not_found_error_with_the_paths(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.chat.completions.create(model="run", messages=[])
        self.assertIn("/v1/completions", caught.exception.message)

    def test_timeout_of_the_client_leaves_the_server_well(self):
        with client_of(self.server, timeout=0.5) as client:
            with self.assertRaises(openai.APITimeoutError):
                client.completions.create(model="run", **ENDLESS)
        wait_for(lambda: metric(self.server, "assay_sequences_decoding") == 0)
        self.assertEqual(len(self.complete().choices), 1)


class States(unittest.TestCase):
    def test_full_queue_raises_rate_limit_error(self):
        async def fill_and_ask(server):
            async with openai.AsyncOpenAI(api_key=KEY, base_url=server.url + "/v1",
                                          max_retries=0) as client:
                async with await client.completions.create(model="run", n=8, stream=True,
                                                           **ENDLESS) as working:
                    await anext(aiter(working))  # it has the slot, and its samples wait for it
                    task = asyncio.create_task(client.completions.create(model="run", **ENDLESS))
                    while metric(server, "assay_requests_queued") != 1:
                        await asyncio.sleep(0.01)
                    with self.assertRaises(openai.RateLimitError) as caught:
                        await client.completions.create(model="run", prompt="A")
                    task.cancel()
            return caught.exception

        with Server(PROGRAM, FOLDER / "run", "--threads", 1, "--slots", 1, "--queue", 1) as server:
            error = asyncio.run(fill_and_ask(server))
        self.assertEqual(error.status_code, 429)
        self.assertEqual(error.type, "rate_limit_error")
        self.assertEqual(error.response.headers["retry-after"], "1")

    def test_stopping_server_refuses_with_503(self):
        server = Server(PROGRAM, FOLDER / "run", "--threads", 1, "--drain", 600)
        with client_of(server) as client, client_of(server) as other:
            client.models.list()  # this connection stays open after the port is closed
            with other.completions.create(model="run", stream=True, **ENDLESS) as stream:
                next(iter(stream))
                server.process.terminate()
                with self.assertRaises(openai.InternalServerError) as caught:
                    while True:  # the first requests may still be accepted
                        client.completions.create(model="run", prompt="A", max_tokens=0)
        self.assertEqual(caught.exception.status_code, 503)
        self.assertEqual(caught.exception.code, "stopping")
        self.assertEqual(server.wait(), 0)

    def test_absent_server_raises_connection_error(self):
        server = Server(PROGRAM, FOLDER / "run", "--threads", 1)
        server.kill()
        with client_of(server) as client, self.assertRaises(openai.APIConnectionError):
            client.models.list()


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
