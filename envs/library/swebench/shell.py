"""The bash of an episode: command lines over files in memory. No process, no real file, no clock.

It has what agents use on repositories: quotes, `$VAR` and `$(...)`, globs, heredocs, redirections, pipes, `&&`, `||`, `;`, `for` and `if`.
Anything else ends with an error in bash's words. Input is hostile: a command line may be anything at all, and nothing raises but
`ShellError`, which `Shell.run` turns into output and a return code.
"""

import re

MAX_COMMAND = 50_000
MAX_OUTPUT = 300_000  # characters of one command
MAX_TREE = 400_000  # characters of all files
MAX_FILES = 400
MAX_RUNS = 100  # simple commands of one command line
ADDRESS = re.compile(r"\b0x[0-9a-f]{9,}")  # where an object lies differs between two runs of the same episode
RESERVED = {"then", "fi", "do", "done", "else", "elif"}
ENVIRONMENT = {"HOME": "/root", "PWD": ROOT, "PATH": "/usr/local/bin:/usr/bin:/bin", "PAGER": "cat", "USER": "root", "SHELL": "/bin/bash"}


class Shell:
    """Files `{absolute path: text}`, the last commit and the index, and what runs on them.

    Attributes:
      tree: the files now; `head` and `index`: what git knows, {path relative to ROOT: text}.
    """

    def __init__(self, files):
        self.head = dict(files)
        self.index = dict(files)
        self.tree = {f"{ROOT}/{path}": text for path, text in files.items()}
        self.folders = set()
        self.cwd, self.variables, self.runs, self.steps = ROOT, {}, 0, MAX_STEPS

    def run(self, command):
        """Runs one command line in a new subshell: (output with errors, return code)."""
        self.cwd, self.variables, self.runs, self.steps = ROOT, dict(ENVIRONMENT) | {"?": "0"}, 0, MAX_STEPS
        before = dict(self.tree)
        try:
            if len(command) > MAX_COMMAND:
                raise ShellError("bash: Argument list too long", 126)
            out, code = self.script(command)
            if len(self.tree) > MAX_FILES or sum(map(len, self.tree.values())) > MAX_TREE:
                raise ShellError("bash: write error: No space left on device", 1)
        except ShellError as error:
            self.tree = before
            shown = f"bash: -c: line 1: `{command}'\n" if "near unexpected token" in error.args[0] else ""
            return f"{error.args[0]}\n{shown}", error.args[1]
        except RecursionError:
            self.tree = before
            return "bash: the command line is nested too deeply\n", 2
        return ADDRESS.sub("0x7f0000000000", out).encode("utf-8", "replace").decode(), code

    def script(self, text, stdin=""):
        tokens = tokenise(text)
        out, code, rest = self.sequence(tokens, 0, stdin, ())
        if rest < len(tokens):
            raise ShellError(f"bash: -c: line 1: syntax error near unexpected token `{_shown(tokens[rest])}'", 2)
        return out, code

    def sequence(self, tokens, position, stdin, ends, skip=False):
        """Commands up to one of the words `ends` or a closing parenthesis: (output, return code, position)."""
        out, code, run = [], 0, True
        while position < len(tokens):
            if tokens[position] in (";", "\n"):
                position, run = position + 1, True
                continue
            if tokens[position] == ")" or _plain(tokens[position]) in ends:
                break
            text, result, position = self.pipeline(tokens, position, stdin, skip or not run)
            if run and not skip:
                out.append(text)
                code = result
                self.variables["?"] = str(code)
            if sum(map(len, out)) > MAX_OUTPUT:
                raise ShellError("bash: the command prints more than the sandbox allows", 1)
            if position < len(tokens):
                if tokens[position] in ("&&", "||"):
                    run = (code == 0) == (tokens[position] == "&&") if run or code is not None else run
                    position += 1
                    if position >= len(tokens):
                        raise ShellError("bash: -c: line 1: syntax error: unexpected end of file", 2)
                elif tokens[position] == "&":
                    raise ShellError("bash: background jobs are not emulated", 2)
                elif tokens[position] not in (";", "\n", ")") and _plain(tokens[position]) not in ends:
                    raise ShellError(f"bash: -c: line 1: syntax error near unexpected token `{_shown(tokens[position])}'", 2)
        return "".join(out), code, position

    def pipeline(self, tokens, position, stdin, skip):
        shown, code, negate = [], 0, False
        if _plain(tokens[position]) == "!":
            negate, position = True, position + 1
        while True:
            if position >= len(tokens):
                raise ShellError("bash: -c: line 1: syntax error: unexpected end of file", 2)
            out, err, code, position = self.command(tokens, position, stdin, skip)
            if position < len(tokens) and tokens[position] in ("|", "|&"):
                stdin = out + (err if tokens[position] == "|&" else "")
                if tokens[position] == "|":
                    shown.append(err)
                position += 1
                while position < len(tokens) and tokens[position] == "\n":
                    position += 1
                continue
            return "".join(shown) + out + err, int(code == 0) if negate else code, position

    def command(self, tokens, position, stdin, skip):
        """One simple or compound command: (output, errors, return code, position)."""
        token = tokens[position]
        name = _plain(token)
        if token == "(" or name == "{":
            close = ")" if token == "(" else "}"
            cwd = self.cwd
            out, code, position = self.sequence(tokens, position + 1, stdin, ("}",) if close == "}" else (), skip)
            self.cwd = cwd if token == "(" else self.cwd
            position = self.expect(tokens, position, close)
            return self.redirected(tokens, position, out, "", code, skip)
        if name == "for":
            return self.loop(tokens, position, stdin, skip)
        if name == "if":
            return self.branch(tokens, position, stdin, skip)
        if name in ("while", "until", "case", "function", "select", "[["):
            raise ShellError(f"bash: `{name}' is not emulated in this sandbox", 2)
        if isinstance(token, str) and token not in REDIRECTS or name in RESERVED:
            raise ShellError(f"bash: -c: line 1: syntax error near unexpected token `{_shown(token)}'", 2)
        words, redirects = [], []
        while position < len(tokens):
            token = tokens[position]
            if isinstance(token, Word):
                words.append(token)
                position += 1
            elif token in REDIRECTS:
                if token in ("2>&1", "1>&2", ">&2"):
                    redirects.append((token, None))
                    position += 1
                elif position + 1 < len(tokens) and isinstance(tokens[position + 1], Word):
                    redirects.append((token, tokens[position + 1]))
                    position += 2
                else:
                    raise ShellError("bash: -c: line 1: syntax error near unexpected token `newline'", 2)
            else:
                break
        if skip:
            return "", "", 0, position
        return *self.simple(words, redirects, stdin), position

    def expect(self, tokens, position, wanted):
        if position >= len(tokens):
            raise ShellError("bash: -c: line 1: syntax error: unexpected end of file", 2)
        if tokens[position] != wanted and _plain(tokens[position]) != wanted:
            raise ShellError(f"bash: -c: line 1: syntax error near unexpected token `{_shown(tokens[position])}'", 2)
        return position + 1

    def redirected(self, tokens, position, out, err, code, skip):
        redirects = []
        while position < len(tokens) and tokens[position] in REDIRECTS:
            target = None
            if tokens[position] not in ("2>&1", "1>&2", ">&2"):
                position += 1
                if position >= len(tokens) or not isinstance(tokens[position], Word):
                    raise ShellError("bash: -c: line 1: syntax error near unexpected token `newline'", 2)
                target = tokens[position]
            redirects.append((tokens[position] if target is None else tokens[position - 1], target))
            position += 1
        if not skip:
            out, err, code = self.redirect(redirects, out, err, code)
        return out, err, code, position

    def loop(self, tokens, position, stdin, skip):
        variable = _plain(tokens[position + 1]) if position + 1 < len(tokens) else None
        if not variable or not variable.isidentifier():
            raise ShellError("bash: -c: line 1: syntax error near unexpected token `for'", 2)
        position = self.expect(tokens, position + 2, "in")
        words = []
        while position < len(tokens) and isinstance(tokens[position], Word):
            words.append(tokens[position])
            position += 1
        while position < len(tokens) and tokens[position] in (";", "\n"):
            position += 1
        start = self.expect(tokens, position, "do")
        _, _, end = self.sequence(tokens, start, "", ("done",), True)
        out, code = [], 0
        for value in [] if skip else [text for word in words for text in self.expand(word)]:
            self.variables[variable] = value
            text, code, _ = self.sequence(tokens, start, stdin, ("done",))
            out.append(text)
        return self.redirected(tokens, self.expect(tokens, end, "done"), "".join(out), "", code, skip)

    def branch(self, tokens, position, stdin, skip):
        out, code, taken = [], 0, skip
        while True:
            text, result, position = self.sequence(tokens, position + 1, stdin, ("then",), taken)
            out.append(text)
            position = self.expect(tokens, position, "then")
            chosen = not taken and result == 0
            text, result, position = self.sequence(tokens, position, stdin, ("elif", "else", "fi"), not chosen)
            if chosen:
                taken, code = True, result
                out.append(text)
            word = _plain(tokens[position]) if position < len(tokens) else None
            if word == "elif":
                continue
            if word == "else":
                text, result, position = self.sequence(tokens, position + 1, stdin, ("fi",), taken)
                if not taken:
                    code = result
                    out.append(text)
            return self.redirected(tokens, self.expect(tokens, position, "fi"), "".join(out), "", code, skip)

    def simple(self, words, redirects, stdin):
        """A command with its words and redirections: (output, errors, return code)."""
        self.runs += 1
        if self.runs > MAX_RUNS:
            raise ShellError("bash: fork: retry: Resource temporarily unavailable", 254)
        assigned = {}
        while words and words[0] and words[0][0][1] == "plain" and (match := re.match(r"([A-Za-z_]\w*)=", words[0][0][0])):
            word = words.pop(0)
            assigned[match[1]] = "".join(self.expand(Word([(word[0][0][match.end() :], "double"), *word[1:]])))
        args = [text for word in words for text in self.expand(word)]
        for kind, target in redirects:
            if kind in ("<", "<<", "<<<"):
                text = "".join(self.expand(target))
                if kind == "<":
                    if self.path(text) not in self.tree:
                        return self.redirect(redirects, "", f"bash: line 1: {text}: No such file or directory\n", 1)
                    text = self.tree[self.path(text)]
                stdin = text + "\n" if kind == "<<<" else text
        if not args:
            self.variables |= assigned
            return self.redirect(redirects, "", "", 0)
        name = args[0].rpartition("/")[2] if args[0].startswith(("/usr/bin/", "/bin/", "/usr/local/bin/")) else args[0]
        run = COMMANDS.get(name)
        if run is None:
            reason = "No such file or directory" if "/" in name else "command not found"
            out, err, code = "", f"bash: line 1: {args[0]}: {reason}\n", 127
        else:
            out, err, code = run(self, args[1:], stdin)
        return self.redirect(redirects, out, err, code)

    def redirect(self, redirects, out, err, code):
        for position, (kind, target) in enumerate(redirects):
            if kind == "2>&1":
                later = any(other in (">", "1>", ">>", "&>") for other, _ in redirects[position + 1 :])
                if not later:
                    continue  # handled with the file that output goes to, below
            if kind in ("1>&2", ">&2"):
                out, err = "", err + out
            if kind in ("<", "<<", "<<<", "2>&1", "1>&2", ">&2"):
                continue
            path = "".join(self.expand(target))
            text = err if kind.startswith("2") else out
            if kind in (">", "1>", ">>") and any(other == "2>&1" for other, _ in redirects[position + 1 :]) or kind.startswith("&"):
                text, err = out + err, ""
            if kind.startswith("2"):
                err = ""
            else:
                out = ""
            if path == "/dev/null":
                continue
            try:
                self.write(path, text, append=kind.endswith(">>"))
            except OSError as error:
                return "", f"bash: line 1: {path}: {error.args[0]}\n", 1
        if any(kind == "2>&1" for kind, _ in redirects):
            out, err = out + err, ""
        return out, err, code

    # Words
    def expand(self, word):
        """The arguments that a word becomes."""
        fields, current, globbed, quoted = [], "", "", False
        for text, how in word:
            if how in ("plain", "double", "heredoc"):
                text = self.substitute(text, split=how == "plain")
            if how == "plain" and "\x00" in text:
                pieces = text.split("\x00")
                for piece in pieces[:-1]:
                    fields.append((current + piece, globbed + piece, quoted))
                    current, globbed, quoted = "", "", False
                text = pieces[-1]
            if how == "plain" and not current and (text == "~" or text.startswith("~/")):
                text = "/root" + text[1:]
            text = text.replace("\x00", " ") if how == "plain" else text
            current += text
            globbed += text if how == "plain" else re.sub(r"([*?\[])", r"[\1]", text)
            quoted |= how != "plain"
        fields.append((current, globbed, quoted))
        result = []
        for current, globbed, quoted in fields:
            matches = self.matches(globbed) if re.search(r"[*?]|\[(?![*?\[]\])", globbed) else []
            result += matches or ([current] if current or quoted else [])
        return self.braces(result) if any(how == "plain" and "{" in text for text, how in word) else result

    def braces(self, words):
        result = []
        for word in words:
            match = re.match(r"(.*?)\{([^{}$]*,[^{}]*)\}(.*)$", word, re.DOTALL)
            result += self.braces([match[1] + choice + match[3] for choice in match[2].split(",")][:64]) if match else [word]
        return result

    def substitute(self, text, split):
        """`$VAR`, `${VAR}` and `$(...)`; `split` parts the words that come out of it by NUL."""
        result, position = [], 0
        while position < len(text):
            if text.startswith("$(", position) and not text.startswith("$((", position):
                close = _closing(text, position + 1)
                out, _ = self.script(text[position + 2 : close - 1])
                result.append("\x00".join(out.split()) if split else out.rstrip("\n"))
                position = close
                continue
            match = re.compile(r"\$(?:\{(\w+)\}|(\w+|\?))").match(text, position)
            if match:
                result.append(self.variables.get(match[1] or match[2], ""))
                position = match.end()
            else:
                result.append(text[position])
                position += 1
        return "".join(result)

    def matches(self, pattern):
        """Paths that fit a glob, in the form in which it was written."""
        absolute = self.path(pattern)
        depth, found = absolute.count("/"), set()
        for path in [*self.tree, *self.all_folders()]:
            parts = path.split("/")
            if len(parts) > depth and fits("/".join(parts[: depth + 1]), absolute):
                if all(fits(a, b) for a, b in zip(parts, absolute.split("/"), strict=False)):
                    if not parts[depth].startswith(".") or absolute.split("/")[-1].startswith("."):
                        found.add("/".join(parts[: depth + 1]))
        prefix = self.cwd.rstrip("/") + "/"
        if pattern.startswith("/"):
            return sorted(found)
        lead = "./" if pattern.startswith("./") else ""
        return sorted(lead + path.removeprefix(prefix) for path in found)

    # Files
    def path(self, text):
        return normal(text if text.startswith("/") else f"{self.cwd}/{text}")

    def all_folders(self):
        folders = {"/", ROOT, "/tmp", "/root"} | self.folders
        for path in self.tree:
            parts = path.split("/")
            folders.update("/".join(parts[:n]) or "/" for n in range(1, len(parts)))
        return folders

    def is_folder(self, path):
        return path in self.all_folders()

    def write(self, text_path, text, append=False):
        """Writes a file. Raises: OSError with bash's words."""
        path = self.path(text_path)
        if self.is_folder(path):
            raise OSError("Is a directory")
        if not self.is_folder(path.rpartition("/")[0] or "/"):
            raise OSError("No such file or directory")
        text = (self.tree.get(path, "") if append else "") + text
        if len(text) > MAX_OUTPUT:
            raise OSError("No space left on device")
        self.tree[path] = text


REDIRECTS = ("&>>", "&>", "2>&1", "1>&2", ">&2", "2>>", "2>", "1>", ">>", ">", "<<<", "<<", "<")


def _plain(token):
    """The text of a word that is neither quoted nor expanded, None for others."""
    return token[0][0] if isinstance(token, Word) and len(token) == 1 and token[0][1] == "plain" else None


def _shown(token):
    return "newline" if token == "\n" else token if isinstance(token, str) else "".join(text for text, _ in token)
