"""A repository with a fault, a shell, and a grader: the world of the code-repair environments, in the manner of mini-swe-agent.

The capability's `tasks.py` follows this text and defines `CAPABILITY` and `HINT`. The agent reads, edits and runs code with `bash`, writes
`git diff` to a file and submits it. What it submits is applied to the last commit, as the benchmark does, so changes of tests or of other
files count for nothing; then the tests run in a locked worker of their own (`programs`), and `score` compares what they gave with what
they should give. Expected values never enter that worker.
"""

import json
import re

# include: values.py
# include: natives.py
# include: evaluation.py
# include: interpreter.py
# include: grammar.py
# include: blocks_numbers.py
# include: blocks_text.py
# include: blocks_state.py
# include: shapes.py
# include: structures.py
# include: repository.py
# include: patterns.py
# include: sed.py
# include: git.py
# include: runner.py
# include: commands.py
# include: search.py
# include: tokens.py
# include: shell.py


SYSTEM = "You repair programs. You work in a shell: every turn you call the tool bash at least once and read what it prints."

INSTRUCTIONS = """<pr_description>
{issue}
</pr_description>

<instructions>
Change the source files in /testbed, the directory in which every command starts, so that what the description reports is repaired in
general, not for its example alone. Leave tests and configuration as they are, and change no more than is needed.

Each command runs in a new subshell: changes of directory or variables are gone in the next one. Look at the code first, find the cause,
edit it, and check your change, for instance with `python -m pytest`. The shell is small: no network, nothing interactive.

Hand in your work as a patch, in three separate commands:
1. `git diff -- path/of/file > patch.txt`, with the source files that you changed and no others
2. `cat patch.txt`, to see that it holds your change
3. `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt`, exactly so; after it you cannot go on
</instructions>"""

FORMAT_ERROR = """Tool call error:

<error>
{}
</error>

Every answer needs at least one call of the tool bash with your command as the argument: {{"command": "your command"}}.
The first message says how to hand in your work."""

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
MAX_FORMAT_ERRORS = 3  # in a row; then the episode is over
MAX_SHOWN = 10_000  # characters of a command's output; of more the benchmark shows the two ends
DEADLINE_S = 5.0
TOO_LONG = """<warning>
The output of your last command was too long.
Use a command that prints less: head, tail or sed for a few lines of a file, a narrower pattern for grep or find.
</warning>
<output_head>
{head}
</output_head>
<elided_chars>
{elided} characters elided
</elided_chars>
<output_tail>
{tail}
</output_tail>"""


def observation(output, code):
    """A command's result in the benchmark's form."""
    if len(output) < MAX_SHOWN:
        body = f"<output>\n{output}</output>"
    else:
        half = MAX_SHOWN // 2
        body = TOO_LONG.format(head=output[:half], elided=len(output) - MAX_SHOWN, tail=output[-half:])
    return f"<returncode>{code}</returncode>\n{body}"


class Environment:
    """One episode."""

    def reset(self, seed, knobs):
        self.task = make_task(seed, CAPABILITY, knobs)
        self.shell = Shell(self.task["files"])
        self.log = []
        self.errors, self.submission, self.ended = 0, None, False
        return {"system": SYSTEM, "messages": [{"role": "user", "content": INSTRUCTIONS.format(issue=self.task["issue"])}]}

    def call(self, name, arguments):
        self.log.append({"name": name})
        command = arguments.get("command") if isinstance(arguments, dict) else None
        if name != "bash" or not isinstance(command, str):
            return self.format_error(f"Unknown tool '{name}'." if name != "bash" else "Missing 'command' argument in bash tool call.")
        self.errors = 0
        output, code = self.shell.run(command)
        lines = output.lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == SUBMIT and code == 0:
            self.submission, self.ended = "".join(lines[1:]), True
        return observation(output, code)

    def respond(self, text):
        self.log.append({"text": text})
        answer = self.format_error("No tool calls found in the response. Every response MUST include at least one tool call.")
        return None if self.ended else answer

    def format_error(self, reason):
        self.errors += 1
        self.ended |= self.errors >= MAX_FORMAT_ERRORS
        return FORMAT_ERROR.format(reason)

    def done(self):
        return self.ended

    # The verdict
    def candidate(self):
        """(source files as they were handed in, or else as they are, why the form is wrong or None)."""
        prefix = self.task["package"] + "/"
        head, fault = self.shell.head, None
        files = {path.removeprefix("/testbed/"): text for path, text in self.shell.tree.items()}
        if self.submission is None:
            fault = "no patch was submitted"
        else:
            try:
                files = apply_patch(head, self.submission)
            except PatchError as error:
                fault = f"the submitted text is no patch that fits: {error}"
            else:
                others = [p for p in {*files, *head} if files.get(p) != head.get(p) and not (p.startswith(prefix) and p.endswith(".py"))]
                if others:
                    fault = f"the patch changes other files: {', '.join(sorted(others))[:200]}"
        return {path: text for path, text in files.items() if path.startswith(prefix) and path.endswith(".py")}, fault

    def patch(self, files):
        """What turns the last commit's source files into these, as `git diff` prints it."""
        old = {path: text for path, text in self.task["files"].items() if path in self.task["right"]}
        return "".join(diff(path, old.get(path), files.get(path)) for path in sorted({*old, *files}) if old.get(path) != files.get(path))

    def tests(self):
        return [*self.task["order"], *self.task["variants"], *self.task["kept"]]

    def programs(self):
        """The tests over the candidate, in one process; none where nothing was changed."""
        files, _ = self.candidate()
        if all(files.get(path) == text for path, text in self.task["files"].items() if path.startswith(self.task["package"] + "/")):
            return []
        return [{"files": files, "code": test_program(self.tests()), "deadline_s": DEADLINE_S}]

    def score(self, results=()):
        """The verdict on what the programs gave.

        1 if the target test and its variants pass, nothing else fails, the edit is small and it was handed in as a patch of source files;
        0.7 with the last two missing, 0.85 with one of them. A partial repair earns up to 0.3, half of that if it breaks something.
        """
        files, fault = self.candidate()
        tests = self.tests()
        if results:
            value = results[0].get("value") if not results[0].get("error") else None
            found = value if isinstance(value, list) and len(value) == len(tests) else [["not run"]] * len(tests)
        else:
            found = [test["before"] for test in tests]
        base = {path: text for path, text in self.task["files"].items() if path in self.task["right"]}
        size = sum(changed_lines(base.get(path, ""), files.get(path, "")) for path in sorted({*base, *files}))
        limit = max(2 * self.task["edit_size"], self.task["edit_size"] + 6)
        last = len(self.log) - 1 if self.log else None
        checks, broken, wanted = {}, [], {self.task["target"]["name"], *(test["name"] for test in self.task["variants"])}
        for test, got in zip(tests, found, strict=True):
            passed = json.dumps(got, sort_keys=True) == json.dumps(test["expected"], sort_keys=True)
            if test["name"] in wanted:
                checks[f"test:{test['name']}"] = {"passed": passed, "expected": test["expected"], "actual": shortened(got), "call": last}
            elif not passed:
                broken.append(test["name"])
        share = sum(check["passed"] for check in checks.values()) / len(checks)
        checks["regression"] = {"passed": not broken, "expected": [], "actual": broken[:20], "call": last}
        checks["edit_size"] = {"passed": 0 < size <= limit, "expected": f"1 to {limit} lines", "actual": size, "call": last}
        handed_in = self.patch(files) if fault is None else None
        checks["patch"] = {"passed": handed_in is not None, "expected": self.patch(self.task["right"]), "actual": handed_in, "call": last}
        checks["format"] = {"passed": fault is None, "expected": "a submitted patch of source files", "actual": fault, "call": last}
        if not results:
            reward = 0.0
        elif share == 1.0 and not broken:
            reward = 0.7 + 0.15 * checks["edit_size"]["passed"] + 0.15 * checks["format"]["passed"]
        else:
            reward = 0.3 * share * (0.5 if broken else 1.0)
        return {"reward": round(reward, 6), "checks": checks}


def shortened(value):
    text = json.dumps(value)
    return value if len(text) <= 1_000 else text[:1_000]


def edit_command(path, edits):
    """A command that makes the edits [(first line, last line, new lines)] of one file: sed for a single line, else a script."""
    first, last, new = edits[0]
    if len(edits) == 1 and first == last and len(new) == 1:
        text = re.sub(r"([\\/&])", r"\\\1", new[0]).replace("'", "'\\''")
        return f"sed -i '{first}s/.*/{text}/' {path}"
    lines = [f'path = "{path}"', 'lines = open(path).read().split("\\n")']
    lines += [f"lines[{first - 1}:{last}] = {new!r}" for first, last, new in reversed(edits)]
    return "python - <<'EOF'\n" + "\n".join([*lines, 'open(path, "w").write("\\n".join(lines))']) + "\nEOF"


def oracle(seed, knobs):
    """The commands of an agent that knows the fault: a look, the edits, the patch."""
    task = make_task(seed, CAPABILITY, knobs)
    paths = sorted({path for path, *_ in task["edits"]})
    commands = [f"grep -n 'def ' {' '.join(paths)} | head -40"]
    commands += [edit_command(path, [tuple(edit) for name, *edit in task["edits"] if name == path]) for path in paths]
    commands += [f"git diff -- {' '.join(paths)} > patch.txt", "cat patch.txt", f"echo {SUBMIT} && cat patch.txt"]
    return [{"name": "bash", "arguments": {"command": command}} for command in commands]


def hint(seed, knobs):
    """Guidance that names no file, no line and no edit."""
    return HINT
