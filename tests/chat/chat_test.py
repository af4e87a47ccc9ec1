# SPDX-License-Identifier: Apache-2.0
"""Text through ./run.sh chat's program: chat_test.py DECODER DATA, with the packages of examples/chat."""
import json
import os
import pathlib
import pty
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "examples" / "chat"))

from decoder import Answer, Decoder  # noqa: E402
from text import TextError, TextModel, TextStream  # noqa: E402
from tokenizers import Tokenizer, decoders, models  # noqa: E402

DECODER, DATA = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
CHAT = [sys.executable, str(ROOT / "examples" / "chat" / "chat.py"), "--decoder", DECODER]
EXACT = ["--activation", "f32", "--kv-dtype", "f32", "--threads", "1"]
MODELS = ("llama-wordnet", "deepseek-wordnet")
BOS = "<|begin_of_text|>"  # of llama-wordnet


def tokenizer_of(**changes: object) -> dict:
    """tokenizer.json of llama-wordnet with other entries."""
    return {**json.loads((DATA / "llama-wordnet" / "tokenizer.json").read_text()), **changes}


def write_model(folder: str, tokenizer: dict, **config: object) -> TextModel:
    (pathlib.Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer))
    (pathlib.Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
    return TextModel(pathlib.Path(folder))


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run([*CHAT, *arguments], input=text, capture_output=True, text=True, timeout=120)


class GoldenTexts(unittest.TestCase):
    def check(self, widths: list[str]) -> None:
        for name in MODELS:
            golden = json.loads((DATA / name / "golden-text.json").read_text())
            for case in golden["cases"]:
                with self.subTest(model=name, text=case["text"], widths=widths):
                    answer = run(
                        "--model", str(DATA / name), "--raw", "--special", "--ignore-eos", "--max-tokens", str(len(case["tokens"])),
                        case["text"], "--", *EXACT, *widths,
                    )  # fmt: skip
                    self.assertEqual(answer.stdout.rstrip("\n"), case["completion"].rstrip("\n"), answer.stderr)

    def test_one_rank(self) -> None:
        self.check([])

    def test_kvp(self) -> None:
        self.check(["--kvp", "2"])

    def test_pipeline_of_kvp(self) -> None:
        self.check(["--kvp", "2", "--pp", "2"])


class TextModels(unittest.TestCase):
    def test_prompts_are_the_golden_ids(self) -> None:
        for name in MODELS:
            model = TextModel(DATA / name)
            for case in json.loads((DATA / name / "golden-text.json").read_text())["cases"]:
                self.assertEqual(model.encode(case["text"]), case["prompt"])

    def test_a_stream_gives_the_whole_text(self) -> None:
        model = TextModel(DATA / "llama-wordnet")
        for text in ("plain", "caf\u00e9 \u65e5\u672c \U0001f642 end"):
            stream = model.stream(keep_special=False)
            parts = [stream.add(token) for token in model.encode(text)]
            self.assertEqual("".join(parts), text)

    def test_a_conversation_is_what_its_template_says(self) -> None:
        model = TextModel(DATA / "llama-wordnet")
        ids = model.encode_chat([{"role": "user", "content": " hi "}])
        stream = model.stream(keep_special=True)
        self.assertEqual(
            "".join(stream.add(token) for token in ids),
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        )

    def test_other_places_of_a_template(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder)
            (copy / "tokenizer.json").write_bytes((DATA / "llama-wordnet" / "tokenizer.json").read_bytes())
            self.assertFalse(TextModel(copy).has_template)
            listed = {"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]}
            (copy / "tokenizer_config.json").write_text(json.dumps(listed))
            self.assertEqual(TextModel(copy).encode_chat([{"role": "user", "content": "a b"}]), TextModel(copy).encode("a b")[1:])
            (copy / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
            with self.assertRaisesRegex(TextError, "says: no"):
                TextModel(copy).encode_chat([])
            for bad in ("{{ ''.__class__.__mro__ }}{% for %}", "{{ 1 / 0 }}", "{{ 1 + 'a' }}"):
                (copy / "chat_template.jinja").write_text(bad)
                with self.subTest(template=bad), self.assertRaisesRegex(TextError, "cannot be rendered"):
                    TextModel(copy).encode_chat([])
            loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
            (copy / "chat_template.jinja").write_text(loops)
            with unittest.mock.patch("template._MAX_SECONDS", 0.2):
                with self.assertRaisesRegex(TextError, "chat_template.jinja: the chat template takes more than 0.2 s"):
                    TextModel(copy).encode_chat([])
            with self.assertRaises(ChildProcessError, msg="a process is left"):
                os.waitpid(-1, os.WNOHANG)
            (copy / "chat_template.jinja").write_bytes(b"\xff")
            with self.assertRaisesRegex(TextError, "chat_template.jinja: .*utf-8"):
                TextModel(copy)

    def test_hostile_text_files_give_one_error(self) -> None:
        def grow(file: pathlib.Path) -> None:
            file.touch()
            os.truncate(file, 1 << 36)  # sparse

        with tempfile.TemporaryDirectory() as folder:
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                for make, words in (
                    (grow, "has 68719476736 bytes" if name != "tokenizer.json" else ""),
                    (os.mkfifo, "missing" if name == "tokenizer.json" else "is no file"),
                    (pathlib.Path.mkdir, "missing" if name == "tokenizer.json" else "is no file"),
                    (lambda file: file.symlink_to("nowhere"), "missing" if name == "tokenizer.json" else "leads to none"),
                    (lambda file: file.write_text("version https://git-lfs"), "Git LFS"),
                ):
                    with self.subTest(name=name, words=words), tempfile.TemporaryDirectory() as other:
                        copy = pathlib.Path(other)
                        if name != "tokenizer.json":
                            (copy / "tokenizer.json").symlink_to(DATA / "llama-wordnet" / "tokenizer.json")
                        make(copy / name)
                        with self.assertRaisesRegex(TextError, f"{name}: .*{words}"):
                            TextModel(copy)
            copy = pathlib.Path(folder)
            (copy / "tokenizer.json").write_text(json.dumps(tokenizer_of()))
            (copy / "tokenizer_config.json").write_text('{"a":' + "[" * 100000)
            with self.assertRaisesRegex(TextError, "tokenizer_config.json: .*recursion"):
                TextModel(copy)
            config = {"chat_template": "{{ raise_exception('no\nway\x1b[1m') }}"}
            (copy / "tokenizer_config.json").write_text(json.dumps(config))
            for file in ("config.json", "model.safetensors"):
                (copy / file).symlink_to(DATA / "llama-wordnet" / file)
            said = run("--model", folder, "hi", "--", "--threads", "1")
            file = copy / "tokenizer_config.json"
            self.assertEqual((said.returncode, said.stderr), (1, f"chat: {file}: the chat template says: no\\nway\\x1b[1m\n"))
            # Before that, the library's panic message gives its place.
            endless = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
            write_model(folder, tokenizer_of(pre_tokenizer=endless))
            said = run("--model", folder, "a" * 40 + "b", "--", "--threads", "1")
            self.assertEqual(said.returncode, 1)
            self.assertIn("chat: the tokenizer cannot take the text: ", said.stderr.splitlines()[-1])

    def test_the_first_token_is_there_once_or_not_at_all_as_add_bos_token_says(self) -> None:
        plain = TextModel(DATA / "llama-wordnet").encode("a b")[1:]
        bos = Tokenizer.from_file(str(DATA / "llama-wordnet" / "tokenizer.json")).token_to_id(BOS)
        without = tokenizer_of(post_processor=None)
        with tempfile.TemporaryDirectory() as folder:
            for tokenizer, config, ids in (
                (without, {}, plain),
                (without, {"add_bos_token": True, "bos_token": BOS}, [bos, *plain]),
                (without, {"add_bos_token": True, "bos_token": {"content": BOS, "lstrip": False}}, [bos, *plain]),
                (without, {"add_bos_token": False, "bos_token": BOS}, plain),
                (tokenizer_of(), {"bos_token": BOS}, [bos, *plain]),
                (tokenizer_of(), {"add_bos_token": True, "bos_token": BOS}, [bos, *plain]),
                (tokenizer_of(), {"add_bos_token": False, "bos_token": BOS}, plain),
            ):
                with self.subTest(config=config, has_template=tokenizer is not without):
                    self.assertEqual(write_model(folder, tokenizer, **config).encode("a b"), ids)
            model = write_model(folder, without, add_bos_token=True, bos_token=BOS)
            self.assertEqual(model.encode(BOS + "a b"), [bos, *plain])
            model = write_model(folder, tokenizer_of(), add_bos_token=False, bos_token=BOS)
            self.assertEqual(model.encode(BOS + "a b"), [bos, *plain])
            for config, words in (
                ({"add_bos_token": "yes"}, "add_bos_token is 'yes', not true or false"),
                ({"add_bos_token": True}, "bos_token '' is no token"),
                ({"add_bos_token": True, "bos_token": "<nothing>"}, "bos_token '<nothing>' is no token"),
            ):
                with self.subTest(config=config), self.assertRaisesRegex(TextError, words):
                    write_model(folder, without, **config).encode("a b")

    def test_truncation_and_padding_of_the_training_are_not_for_prompts(self) -> None:
        trained = Tokenizer.from_file(str(DATA / "llama-wordnet" / "tokenizer.json"))
        trained.enable_truncation(4)
        trained.enable_padding(length=64)
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(folder, json.loads(trained.to_str()))
            for text in ("a", "a long text of many tokens"):
                self.assertEqual(model.encode(text), TextModel(DATA / "llama-wordnet").encode(text))

    def test_templates_have_what_transformers_gives_them(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for template, text in (
                ("{{ strftime_now('%Y') }}", time.strftime("%Y")),
                ("{% if tools is none and documents is none %}none{% endif %}", "none"),
                ("{{ {'a': '<b> \u00e9'} | tojson }}", '{"a": "<b> \u00e9"}'),
                ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
                ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "a b!"),
            ):
                with self.subTest(template=template):
                    model = write_model(folder, tokenizer_of(), chat_template=template)
                    ids = model.encode_chat([{"role": "user", "content": "a b"}])
                    self.assertEqual(ids, model.encode(text)[1:])

    def test_templates_have_the_special_tokens(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ mask_token }}|"
            template += "{% if sep_token is defined %}sep{% endif %}|{{ additional_special_tokens | join('+') }}"
            config = {
                "chat_template": template, "bos_token": "a", "eos_token": None, "pad_token": {"content": "b"},
                "mask_token": "m", "additional_special_tokens": ["c", {"content": "d"}],
            }  # fmt: skip
            model = write_model(folder, tokenizer_of(), **config)
            self.assertEqual(model.encode_chat([]), model.encode("a||b||m||c+d")[1:])
            # Entries that tokenizer_config.json lacks.
            file = pathlib.Path(folder) / "special_tokens_map.json"
            file.write_text(json.dumps({"unk_token": {"content": "u"}, "mask_token": "n", "eos_token": "e"}))
            model = TextModel(pathlib.Path(folder))
            self.assertEqual(model.encode_chat([]), model.encode("a|e|b|u|m||c+d")[1:])
            for wrong, words in (
                ({"sep_token": 5}, "special_tokens_map.json: sep_token is 5, not text"),
                ([], "special_tokens_map.json: holds no JSON object"),
            ):
                file.write_text(json.dumps(wrong))
                with self.subTest(wrong=wrong), self.assertRaisesRegex(TextError, words):
                    TextModel(pathlib.Path(folder)).encode_chat([])
            file.unlink()
            for wrong in ("c", ["c", 5]):
                model = write_model(folder, tokenizer_of(), **{**config, "additional_special_tokens": wrong})
                with self.subTest(wrong=wrong), self.assertRaisesRegex(TextError, "additional_special_tokens is .*, not a list of texts"):
                    model.encode_chat([])

    def test_bytes_that_are_no_character_are_shown_as_such(self) -> None:
        model = TextModel(DATA / "llama-wordnet")
        moon = model.encode("\u6708")[1:]
        self.assertGreater(len(moon), 1)
        stream = model.stream(keep_special=False)
        self.assertEqual([stream.add(token) for token in moon[:-1]], [""] * (len(moon) - 1))
        self.assertEqual(stream.finish(), "\ufffd")
        # If byte tokens have the form <0x..>, an invalid one makes the valid ones before it invalid too.
        names = ["<0xE6>", "<0x9C>", "<0x88>", "<0xFF>", "\u2581a"]
        tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[4]))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        stream = TextStream(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        self.assertEqual([stream.add(token) for token in (4, 0, 1, 2)], ["a", "", "", "\u6708"])
        parts = [stream.add(token) for token in (3, 4, 4)]
        self.assertEqual("".join(parts), "\ufffd a a")
        self.assertEqual(stream.finish(), "")
        stream.add(0)
        self.assertEqual(stream.finish(), "\ufffd")

    def test_files_of_other_types(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder)
            (copy / "tokenizer.json").write_bytes((DATA / "llama-wordnet" / "tokenizer.json").read_bytes())
            for config, words in (
                ([], "holds no JSON object"),
                ({"chat_template": 5}, "chat_template is 5, not text"),
                ({"chat_template": [{"name": "default"}, "x"], "bos_token": 5}, ""),
                ({"chat_template": "{{ bos_token }}", "bos_token": 5}, "bos_token is 5, not text"),
            ):
                (copy / "tokenizer_config.json").write_text(json.dumps(config))
                with self.subTest(config=config):
                    if words:
                        with self.assertRaisesRegex(TextError, words):
                            TextModel(copy).encode_chat([])
                    else:
                        self.assertFalse(TextModel(copy).has_template)


class Conversations(unittest.TestCase):
    """At a terminal."""

    def setUp(self) -> None:
        self.terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            [*CHAT, "--model", str(DATA / "llama-wordnet"), "--ignore-eos", "--max-tokens", "4000", "--stats", "--", *EXACT],
            stdin=inner, stdout=inner, stderr=inner, preexec_fn=os.setsid,
        )  # fmt: skip
        os.close(inner)
        self.seen = ""
        self.read_until("> ")

    def tearDown(self) -> None:
        code = self.process.wait(timeout=30)
        os.close(self.terminal)
        self.assertEqual(code, 0)

    def read_until(self, words: str) -> str:
        """Returns what came up to and with `words`; the rest is the next call's."""
        end = time.monotonic() + 60
        while words not in self.seen:
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, end - time.monotonic()))
            self.assertTrue(ready, self.seen)
            self.seen += os.read(self.terminal, 65536).decode(errors="replace")
        found, self.seen = self.seen[: self.seen.index(words) + len(words)], self.seen[self.seen.index(words) + len(words) :]
        return found

    def say(self, text: str) -> None:
        os.write(self.terminal, text.encode() + b"\n")

    def check_cut_short(self, stats: str) -> None:
        tokens = int(stats.split(" from the cache; ")[1].split()[0])
        self.assertGreater(tokens, 0)
        self.assertLess(tokens, 4000)

    def test_control_c_ends_an_answer_and_the_next_turn_has_the_cache(self) -> None:
        self.say("what is a helix?")
        self.read_until("helix?")  # the echo of the input
        self.read_until("e")
        time.sleep(0.2)
        os.kill(self.process.pid, signal.SIGINT)
        first = self.read_until("> ")
        self.assertIn("prompt tokens, 0 from the cache", first)
        self.check_cut_short(first)
        self.say("and a river?")
        self.read_until("river?")
        self.read_until("e")
        os.kill(self.process.pid, signal.SIGINT)
        second = self.read_until("> ")
        self.check_cut_short(second)
        cached = int(second.rsplit("prompt tokens, ", 1)[1].split()[0])
        self.assertGreater(cached, 20)
        os.write(self.terminal, b"\x04")


class Cancelling(unittest.TestCase):
    def test_a_cancellation_while_a_prompt_is_being_sent_follows_it(self) -> None:
        """The decoder reads late, so the prompt fills the pipe and the signal comes in the middle of its line."""
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "decoder"
            program.write_text(
                f"#!{sys.executable}\n"
                "import json, sys, time\n"
                "print(json.dumps({'event': 'ready'}), flush=True)\n"
                "time.sleep(1)\n"
                "id = json.loads(sys.stdin.readline())['id']\n"
                "assert json.loads(sys.stdin.readline()) == {'cancel': id}\n"
                "print(json.dumps({'event': 'end', 'id': id, 'reason': 'cancel', 'usage': {}, 'timing': {}}), flush=True)\n"
            )
            program.chmod(0o700)
            answer = Answer()
            with Decoder([str(program)]) as decoder:
                decoder.wait_until_ready()
                previous = signal.signal(signal.SIGALRM, lambda *_: decoder.cancel())
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                try:
                    self.assertEqual(list(decoder.complete(range(100000), answer)), [])
                finally:
                    signal.signal(signal.SIGALRM, previous)
            self.assertEqual(answer.reason, "cancel")


class Answers(unittest.TestCase):
    """Against a decoder that always answers alike and keeps what it was asked."""

    ANSWER = ("<|start_header_id|>", " a caf\u00e9 ", "<|eot_id|>")

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.asked = pathlib.Path(folder.name) / "asked"
        self.model = TextModel(DATA / "llama-wordnet")
        tokens = [token for text in self.ANSWER for token in self.model.encode(text)[1:]]
        self.decoder = pathlib.Path(folder.name) / "decoder"
        self.decoder.write_text(
            f"#!{sys.executable}\n"
            "import json, sys\n"
            "def say(**event):\n    print(json.dumps(event), flush=True)\n"
            "say(event='ready', context=8192, temperature=0.0)\n"
            "for line in sys.stdin:\n"
            f"    open({str(self.asked)!r}, 'a').write(line)\n"
            "    id = json.loads(line)['id']\n"
            f"    for token in {tokens}:\n        say(event='token', id=id, token=token)\n"
            "    say(event='end', id=id, reason='stop', usage={}, timing={})\n"
        )
        self.decoder.chmod(0o700)

    def converse(self, *arguments: str) -> list[list[int]]:
        """Says two things at a terminal; returns what the decoder was asked."""
        terminal, inner = pty.openpty()
        process = subprocess.Popen(
            [*CHAT, "--decoder", str(self.decoder), "--model", str(DATA / "llama-wordnet"), *arguments],
            stdin=inner, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=os.setsid,
        )  # fmt: skip
        os.close(inner)
        os.write(terminal, b"one\ntwo\n\x04")
        self.said = process.communicate(timeout=60)[0].decode()
        os.close(terminal)
        self.assertEqual(process.returncode, 0, self.said)
        return [json.loads(line)["prompt"] for line in self.asked.read_text().splitlines()]

    def test_special_tokens_that_are_shown_are_no_part_of_the_conversation(self) -> None:
        plain = self.converse()
        self.assertNotIn("<|eot_id|>", self.said)
        self.asked.unlink()
        self.assertEqual(self.converse("--special"), plain)
        self.assertEqual(self.said.count("".join(self.ANSWER)), 2, self.said)
        messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": self.ANSWER[1]}]
        self.assertEqual(plain[1], self.model.encode_chat([*messages, {"role": "user", "content": "two"}]))

    def test_what_the_terminal_has_no_letter_for_is_replaced(self) -> None:
        answer = subprocess.run(
            [*CHAT, "--decoder", str(self.decoder), "--model", str(DATA / "llama-wordnet"), "--raw", "--special", "one"],
            capture_output=True, timeout=60, env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )  # fmt: skip
        self.assertEqual((answer.returncode, answer.stderr), (0, b""))
        self.assertIn(b" a caf? ", answer.stdout)


def limit_memory() -> None:
    """Has a rendering without limits fail before it takes the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))


def members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it has ended meanwhile
        if int(its_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


class HostileFiles(unittest.TestCase):
    """Rendered by the program, beside a decoder that waits for a prompt."""

    REMEDY = "; correct it, or leave it out with --raw\n"
    MEMORY = "takes more than 1024 MiB of memory, or than there is"
    TIME = "takes more than 10 s, its loops may have no end"
    ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3

    def start(self, template: str) -> subprocess.Popen:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.model = pathlib.Path(folder.name)
        write_model(folder.name, tokenizer_of(), chat_template=template)
        decoder = self.model / "decoder"
        decoder.write_text('#!/bin/sh\necho \'{"event": "ready", "context": 8192, "temperature": 0.0}\'\nexec cat >"$0.asked"\n')
        decoder.chmod(0o700)
        process = subprocess.Popen(
            [*CHAT, "--decoder", str(decoder), "--model", folder.name, "hi"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=limit_memory,
        )  # fmt: skip
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process: subprocess.Popen) -> None:
        """Whatever a failed test leaves."""
        for member in members(process.pid):
            os.kill(member, signal.SIGKILL)
        process.communicate()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not is_so():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def start_rendering(self) -> subprocess.Popen:
        """One without an end, which runs on return."""
        process = self.start(self.ENDLESS)
        self.wait_until((self.model / "decoder.asked").exists)  # the decoder has left the program's group by then
        self.wait_until(lambda: len(members(process.pid)) == 2)
        return process

    def test_each_ends_with_one_error_within_memory_and_time(self) -> None:
        for template, words in (
            ("{{ '{:1000000000}'.format(5) }}", f"{self.MEMORY}|{self.TIME}"),  # depends on the speed of the machine
            ("{{ 'a'*10**10 }}", self.MEMORY),
            ("{{ 'a'.ljust(10000000000) }}", self.MEMORY),
            ("{{ '%1000000000d' % 5 }}", f"{self.MEMORY}|{self.TIME}"),
            ("{{ (1000000*'a')|replace('a',1000000*'b') }}", self.MEMORY),
            (self.ENDLESS, self.TIME),
            ("{{ 'a'*4100000 }}", "adds more than 4000000 bytes to the conversation"),
        ):
            with self.subTest(template=template):
                start = time.monotonic()
                process = self.start(template)
                said, complaint = process.communicate(timeout=60)
                self.assertEqual((process.returncode, said), (1, ""))
                file = self.model / "tokenizer_config.json"
                self.assertRegex(complaint, rf"\Achat: {file}: the chat template ({words}){self.REMEDY}\Z")
                self.assertLess(time.monotonic() - start, 20)
                self.assertEqual(members(process.pid), [])

    def test_control_c_ends_the_program_and_the_rendering(self) -> None:
        for send in (os.killpg, os.kill):  # as a terminal does, and to the program alone
            with self.subTest(send=send):
                process = self.start_rendering()
                send(process.pid, signal.SIGINT)
                self.assertEqual((*process.communicate(timeout=5), process.returncode), ("", "", 130))
                self.assertEqual(members(process.pid), [])

    def test_a_rendering_does_not_outlive_the_program(self) -> None:
        process = self.start_rendering()
        process.kill()
        process.wait()
        self.wait_until(lambda: not members(process.pid))

    def test_a_crash_is_one_error(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(folder, tokenizer_of(), chat_template="{{ 1 }}")
            with unittest.mock.patch("template._outcome", lambda *_: os.kill(os.getpid(), signal.SIGSEGV)):
                with self.assertRaisesRegex(TextError, "the chat template cannot be rendered: its process ended with SIGSEGV"):
                    model.encode_chat([])

    def test_a_normalizer_that_multiplies_the_text_is_one_error(self) -> None:
        multiply = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 24}
        normalizer = {"type": "Sequence", "normalizers": [multiply] * 6}
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(folder, tokenizer_of(normalizer=normalizer))
            with unittest.mock.patch("text._MAX_ENCODE_MEMORY_MIB", 256):
                with self.assertRaisesRegex(TextError, "the tokenizer cannot take the text with 256 MiB of memory"):
                    model.encode("aaaa")
            with unittest.mock.patch("text._MAX_ENCODE_SECONDS", 0.2):
                with self.assertRaisesRegex(TextError, "the tokenizer cannot take the text within 0.2 s"):
                    model.encode("aaaa")

    def test_a_decoder_that_multiplies_the_text_is_one_error(self) -> None:
        usual = tokenizer_of()["decoder"]
        multiply = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 24}
        mark = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 60 + "!"}
        long = {"type": "Replace", "pattern": {"String": "a"}, "content": ("a" * 14 + "!") * 100_000}
        search = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
        cannot = "the tokenizer cannot give the text of tokens"
        with tempfile.TemporaryDirectory() as folder:
            for more, changed, words in (
                ([multiply] * 6, {"memory_mib": 256}, f"{cannot} with 256 MiB of memory"),
                ([long, search], {"seconds": 1.0}, f"{cannot} within 1 s; see its decoder"),
                ([multiply] * 4, {"max_bytes": 1000}, f"{cannot}: the result has more than 1000 bytes"),
                ([mark, search], {}, f"{cannot}: .*retry-limit"),
            ):
                with self.subTest(words=words), unittest.mock.patch.dict("text._DECODE_LIMITS", changed):
                    model = write_model(folder, tokenizer_of(decoder={"type": "Sequence", "decoders": [usual, *more]}))
                    letter, other = model.encode("a")[-1], model.encode("!")[-1]
                    self.assertEqual(model.stream(keep_special=False).add(other), "!")
                    with self.assertRaisesRegex(TextError, words):
                        model.stream(keep_special=False).add(letter)
                    self.assertEqual(model.stream(keep_special=False).add(other), "!")

    def test_a_panic_of_the_tokenizer_is_one_line(self) -> None:
        normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer_of(normalizer=normalizer)))
            answer = run("--model", folder, "hi")
            self.assertEqual((answer.returncode, answer.stdout), (1, ""))
            self.assertRegex(answer.stderr, r"\Achat: .*tokenizer.json: Precompiled: .*\n\Z")

    def test_a_tokenizer_without_end_is_refused_unread(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with (pathlib.Path(folder) / "tokenizer.json").open("wb") as file:
                file.truncate(3_000_000_000)
            with self.assertRaisesRegex(TextError, "tokenizer.json: has 3000000000 bytes; expected at most 128000000"):
                TextModel(pathlib.Path(folder))

    def test_long_text_comes_back_whole_and_a_long_error_cut_short(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(folder, tokenizer_of(), chat_template="{{ messages[0].content }}")
            text = "caf\u00e9 \u65e5\u672c \U0001f642 " * 20000
            self.assertEqual(model.encode_chat([{"role": "user", "content": text}]), model.encode(text)[1:])
            model = write_model(folder, tokenizer_of(), chat_template="{{ raise_exception('a' * 1000000) }}")
            with self.assertRaisesRegex(TextError, "says: a{500,1000} ...$"):
                model.encode_chat([])


class Errors(unittest.TestCase):
    def test_one_line_that_says_what_to_do(self) -> None:
        wordnet = str(DATA / "llama-wordnet")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        pointer = pathlib.Path(folder.name)
        (pointer / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        for arguments, words in (
            (["--model", str(DATA / "llama-tiny"), "hello"], "tokenizer.json: missing"),
            (["--model", wordnet, "hello", "--", "--kvp", "3"], "KVP 3"),
            (["--model", wordnet, "hello", "--", "--max-sequence", "2"], "--max-sequences"),
            (["--model", wordnet, "--temperature", "-1", "hello"], "temperature is -1"),
            (["--model", wordnet, "hello " * 500, "--", "--context", "100"], "context of 100"),
            (["--model", wordnet, "hello", "--", "--plan-only"], "options that only print"),
            (["--model", wordnet, "hello", "--", "--version"], "options that only print"),
            (["--model", wordnet, b"\xff"], "not UTF-8"),
            (["--model", str(pointer), "hello"], "tokenizer.json: is a Git LFS pointer"),
            (["--model", wordnet, "--top-p", "0.01", "hello"], "--top-p is given, but the likeliest token is taken: give a --temperature"),
            (["--model", wordnet, "--temperature", "0", "--top-k", "5", "hello"], "--top-k is given, but"),
            (["--model", wordnet, "--min-p", "0.5", "hello", "--", "--temperature", "0"], "--min-p is given, but"),
        ):
            with self.subTest(arguments=arguments):
                answer = run(*arguments)
                self.assertEqual(answer.returncode, 1, answer.stderr)
                self.assertIn(words, answer.stderr)
                self.assertEqual(len(answer.stderr.strip().splitlines()), 1, answer.stderr)

    def test_a_system_message_needs_a_conversation(self) -> None:
        answer = run("--model", str(DATA / "llama-wordnet"), "--raw", "--system", "be brief", "hello")
        self.assertEqual(answer.returncode, 2, answer.stderr)
        self.assertIn("leave it out with --raw", answer.stderr)
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder, tokenizer_of())
            for name in ("config.json", "model.safetensors"):
                (pathlib.Path(folder) / name).symlink_to((DATA / "llama-wordnet" / name).resolve())
            answer = run("--model", folder, "--system", "be brief", "hello", "--", *EXACT)
            self.assertEqual(answer.returncode, 1, answer.stderr)
            self.assertIn("no chat template, which --system needs", answer.stderr)

    def test_an_error_does_not_wait_for_a_decoder_that_loads(self) -> None:
        start = time.monotonic()
        with self.assertRaisesRegex(TextError, "no"):
            with Decoder(["sh", "-c", "exec sleep 30"]) as decoder:
                self.assertFalse(decoder.has_ended())
                raise TextError("no")
        self.assertLess(time.monotonic() - start, 10)

    def test_the_decoder_s_warnings_are_passed_on(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder)
            for file in (DATA / "llama-wordnet").resolve().iterdir():
                (copy / file.name).symlink_to(file)
            config = json.loads((copy / "config.json").read_text())
            (copy / "config.json").unlink()
            (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
            answer = run("--model", folder, "--raw", "--max-tokens", "1", "hello", "--", *EXACT)
            self.assertEqual(answer.returncode, 0, answer.stderr)
            self.assertIn("tensors are not used", answer.stderr)

    def test_a_temperature_of_the_decoder_is_one(self) -> None:
        for temperature in (["--temperature", "0.5", "hello", "--"], ["hello", "--", "--temperature", "0.5"]):
            answer = run("--model", str(DATA / "llama-wordnet"), "--raw", "--max-tokens", "1", "--top-p", "0.5", *temperature, *EXACT)
            self.assertEqual((answer.returncode, answer.stderr), (0, ""))

    def test_streams_that_are_closed_or_full_give_one_line_at_most(self) -> None:
        command = " ".join([*CHAT, "--model", str(DATA / "llama-wordnet"), "--raw", "--max-tokens", "3"])
        hello = " hello -- " + " ".join(EXACT)
        for streams, code, words in (
            (hello + " >/dev/full", 1, "chat: the standard streams fail: No space left on device"),
            (hello + " >&-", 1, "chat: the standard streams fail: Bad file descriptor"),
            (hello + " <&-", 0, ""),
            (hello + " <&- >&-", 1, "chat: the standard streams fail: Bad file descriptor"),
            (hello + " 2>&- >/dev/full", 1, ""),
            (hello + " | true", 0, ""),
            (" -- " + " ".join(EXACT) + " <&-", 0, ""),
        ):
            with self.subTest(streams=streams):
                answer = subprocess.run(command + streams, shell=True, capture_output=True, text=True, timeout=120)
                self.assertEqual((answer.returncode, answer.stderr.strip()), (code, words))

    def test_a_pipe_is_a_prompt(self) -> None:
        piped = run("--model", str(DATA / "llama-wordnet"), "--raw", "--max-tokens", "5", "--", *EXACT, text="helix:")
        given = run("--model", str(DATA / "llama-wordnet"), "--raw", "--max-tokens", "5", "helix:", "--", *EXACT)
        self.assertEqual(piped.stdout, given.stdout)
        self.assertTrue(piped.stdout.strip())


if __name__ == "__main__":
    result = unittest.main(argv=sys.argv[:1], exit=False, verbosity=2).result
    sys.exit(0 if result.wasSuccessful() else 1)
