"""The pages, put together on the server: plain links and forms, no script, so that an address holds all of their state.

What an address names is looked up among the rollouts that were found; no part of it becomes a path. Foreign text is escaped by the
templates, and a content security policy allows nothing but our style sheet.
"""

from __future__ import annotations

import contextlib
import ipaddress
import pathlib
import threading
import urllib.parse
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.trajectory import Trajectory
from trace_jax.errors import InputError, Unfinished
from trace_jax.evaluate.statistics import wilson
from trace_jax.report import page as report
from trace_jax.report.changes import common_beginning
from trace_jax.view import conversation, query, tokens
from trace_jax.view.conversation import Text, pretty
from trace_jax.view.query import PAGE, Found, Query, Table
from trace_jax.view.rollouts import RESULTS, Rollouts
from trace_jax.view.rows import ERROR, OUTCOMES, SUCCESS, Listing, Row

_FOLDER = pathlib.Path(__file__).parent
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",  # a rollout that was made again has the same address
}
_MISDIRECTED = "Open this server as http://localhost, or start it with --host=ADDRESS to be reached under other names.\n"
_CHECK = 500  # characters of what a check expected and found that are not folded away
_BESIDE = 60  # rollouts of the same task that a page lists


class Pages:
    """What the routes share."""

    def __init__(self, rollouts: Rollouts, loopback: bool = True):
        self._rollouts, self._loopback = rollouts, loopback
        self._lock, self._table = threading.Lock(), (Listing("", (), looked=False), None)
        self._templates = report.template_environment(_FOLDER)
        self._css = "\n".join((_FOLDER.parent / name).read_text("utf-8") for name in ("report/report.css", "view/view.css"))

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/", self._list),
                Route("/rollout/{key:path}", self._rollout),
                Route("/beside", self._beside),
                Route("/raw/{key:path}", self._raw),
                Route("/text/{key:path}", self._text),
                Route("/view.css", lambda _: Response(self._css, media_type="text/css")),
            ],
            middleware=[Middleware(_Guard, loopback=self._loopback)],
            exception_handlers={
                HTTPException: lambda _, error: self._page("message.html", error.status_code, title="Not here", told=[error.detail]),
                InputError: lambda _, error: self._page("message.html", 500, title="Cannot be read", told=[str(error)]),
                OSError: lambda _, error: self._page("message.html", 503, title="Cannot be read now", told=[str(error)]),
                Unfinished: lambda _, error: self._page("message.html", 503, title="Cannot be read now", told=[str(error)]),
            },
        )

    # --- routes

    def _list(self, request: Request) -> Response:
        asked = Query.parse(request.query_params)
        if any(not value for value in request.query_params.values()):  # a form sends what is not chosen too
            return RedirectResponse(_url("", **asked.parameters()), 303)
        listing, table = self._now()
        found = table.find(asked)
        page = min(asked.page, found.pages)
        rows = [listing.rows[number] for number in found.order[(page - 1) * PAGE : page * PAGE]]
        return self._page(
            "list.html",
            listing=listing,
            asked=asked,
            found=found,
            page=page,
            first=(page - 1) * PAGE + 1,
            rows=rows,
            columns=_columns(listing),
            rate=_rate(found),
            mixed=query.mixed(asked, found),
            alone=self._rollouts.alone,
            facets=[facet for facet in _FACETS if _worth_choosing(found.counts[facet[0]], getattr(asked, facet[0]))],
            lacking=query.lacking,
            main=query.MAIN,
        )

    def _rollout(self, request: Request) -> Response:
        asked = Query.parse(request.query_params)
        listing, table = self._now(self._hurry())
        number, row = self._row(listing, request.path_params["key"])
        trajectory, found = self._rollouts.trajectory(row), table.find(asked)
        place = np.flatnonzero(found.order == number)
        near = dict.fromkeys(("previous", "next"))
        for name, at in zip(near, (place[0] - 1, place[0] + 1) if place.size else (), strict=False):
            if 0 <= at < len(found.order):
                near[name] = listing.rows[found.order[at]]
        every = request.query_params.get("tokens") == "all"
        return self._page(
            "rollout.html",
            place=listing.place,
            asked=asked,
            near=near,
            position=int(place[0]) + 1 if place.size else None,
            list_page=int(place[0]) // PAGE + 1 if place.size else asked.page,
            count=len(found.order),
            group=_group(listing, row),
            others=_others(listing, row),
            tokens=self._tokens(row, trajectory, request.query_params.get("layer", ""), None if every else tokens.MOST),
            every=every,
            **self._side(row, trajectory),
        )

    def _beside(self, request: Request) -> Response:
        asked = Query.parse(request.query_params)
        listing, _ = self._now(self._hurry())
        rows = [self._row(listing, request.query_params.get(name, ""))[1] for name in ("a", "b")]
        sides = [self._side(row, self._rollouts.trajectory(row)) for row in rows]
        shared = common_beginning(*(side["t"].messages for side in sides))
        return self._page("beside.html", place=listing.place, asked=asked, sides=sides, shared=shared)

    def _raw(self, request: Request) -> Response:
        _, row = self._row(self._now(self._hurry())[0], request.path_params["key"])
        return Response(self._rollouts.line(row), media_type="application/json")

    def _text(self, request: Request) -> Response:
        """A text of the rollout, whole: a part of a message, what a check expected or found, the error or the hint."""
        _, row = self._row(self._now(self._hurry())[0], request.path_params["key"])
        found = dict(_texts(self._rollouts.trajectory(row))).get(request.query_params.get("of", ""))
        if found is None:
            raise HTTPException(404, "This rollout has no such text.")
        return PlainTextResponse(found.encode(errors="backslashreplace"))

    # --- what they are made of

    def _now(self, patience: float = 1.0) -> tuple[Listing, Table]:
        """What there is, looked for if it must be: only the list has to have the newest."""
        listing = self._rollouts.now(patience)
        with self._lock:
            if self._table[0] is not listing:
                self._table = listing, Table(listing)
            return self._table

    def _hurry(self) -> float:
        """Seconds that a page of one rollout waits for a look: none, once there was one."""
        return 0.0 if self._table[0].looked else 5.0

    def _row(self, listing: Listing, key: str) -> tuple[int, Row]:
        number = listing.numbers.get(key)
        if number is None:
            later = "" if listing.looked and not listing.unread else " Not all is read yet: load this page again."
            raise HTTPException(404, f"There is no rollout {key!r} in {listing.place}.{later}")
        return number, listing.rows[number]

    def _side(self, row: Row, trajectory: Trajectory) -> dict[str, Any]:
        """One rollout, as macros take it."""
        checks = [
            (name, check, [(f"check:{name}:{of}", Text.of(pretty(check.get(of)), shown=_CHECK)) for of in ("expected", "actual")])
            for name, check in trajectory.checks.items()
        ]
        return {
            "row": row,
            "t": trajectory,
            "checks": checks,
            "messages": conversation.messages(trajectory, row.labels),
            "hint": Text.of(pretty((trajectory.hint or {}).get("text") or "")),
            "fault": Text.of(pretty((trajectory.error or {}).get("message") or "")),
        }

    def _tokens(self, row: Row, trajectory: Trajectory, layer: str, most: int | None) -> tokens.Tokens | None:
        where = "" if row.where == RESULTS else row.where
        pieces, routing = (self._rollouts.file(where, f"gate/{name}.json") for name in ("pieces", "routing"))
        slots = _names(routing.get("slots") if isinstance(routing, dict) else None) or ["base"]
        return tokens.shown_tokens(trajectory, _names(pieces), slots, int(layer) if layer.isdecimal() and len(layer) < 9 else None, most)

    def _page(self, template: str, status: int = 200, **context: Any) -> HTMLResponse:
        return HTMLResponse(self._templates.get_template(template).render(url=_url, outcomes=_OUTCOMES, **context), status)


class _Guard:
    """Headers of every answer; and a server that only this machine reaches answers only under this machine's names, so that no page of
    another site can read it by a name that it has given to this address."""

    def __init__(self, app: ASGIApp, loopback: bool):
        self._app, self._loopback = app, loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        host = Request(scope).headers.get("host", "")
        name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
        app = self._app if not self._loopback or is_loopback(name) else PlainTextResponse(_MISDIRECTED, 421)
        await app(scope, receive, guarded)


def is_loopback(name: str) -> bool:
    """Whether a name of a server, as it stands in addresses, can only be this machine itself."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    return name.lower() == "localhost"


# the choices of the list: parameter, label
_FACETS = (
    ("where", "Workdir"),
    ("policy", "Policy"),
    ("split", "Split"),
    ("environment", "Environment"),
    ("reward", "Reward"),
    ("ended", "Ended with"),
    ("capability", "Capability"),
    ("label", "Its label"),
    ("hinted", "With a hint"),
    ("slots", "Slots of tokens"),
)
_OUTCOMES = dict(zip(OUTCOMES, ("good", "warn", "bad", "soft"), strict=True))


def _columns(listing: Listing) -> list[tuple[str, str, bool]]:
    """(column, heading, whether it is text) of those in which something can differ."""
    wanted = [("id", "rollout", True), ("reward", "reward", True), ("where", "workdir", True), ("policy", "policy", True)]
    wanted += [("split", "split", True), ("environment", "environment", True), ("ended", "ended with", True), ("turns", "turns", False)]
    wanted += [("tokens", "tokens", False), ("hinted", "hint", True), ("lacking", "lacking", True)]
    said = {
        "where": len({row.where for row in listing.rows}) > 1,
        "split": any(row.split for row in listing.rows),
        "tokens": any(row.tokens is not None for row in listing.rows),
        "hinted": any(row.hinted for row in listing.rows),
        "lacking": any(row.labels for row in listing.rows),
    }
    return [column for column in wanted if said.get(column[0], True)]


def _worth_choosing(counts: Sequence[tuple[str, int]], chosen: str) -> bool:
    return bool(chosen) or len(counts) > 1


def _rate(found: Found) -> tuple[float, list[float]] | None:
    """Success with its 95 % interval, None where nothing was graded."""
    if not found.graded:
        return None
    return found.successes / found.graded, [float(bound) for bound in wilson(found.successes, found.graded)]


def _names(value: Any) -> list[str] | None:
    """A list of texts; None for anything else, which files of the workdir may hold that somebody else wrote."""
    return value if isinstance(value, list) and all(isinstance(name, str) for name in value) else None


def _group(listing: Listing, row: Row) -> list[Row]:
    """All trials that a rollout's reward is set beside."""

    def of(one: Row) -> tuple[Any, ...]:
        return one.where, one.folder, one.version, one.split, one.environment, one.task, one.group

    wanted = of(row)
    return [one for one in listing.rows if one.task == row.task and of(one) == wanted]


def _others(listing: Listing, row: Row) -> list[tuple[str, list[Row], int, int]]:
    """(policy, its rollouts of the same task, successes, graded), the row's own policy left out."""
    found: dict[str, list[Row]] = {}
    for one in listing.rows:
        if one.task == row.task and one.environment == row.environment and (one.policy, one.where) != (row.policy, row.where):
            found.setdefault(f"{one.policy} ({one.where})" if one.where else one.policy, []).append(one)
    return [
        (name, rows[:_BESIDE], sum(r.outcome == SUCCESS for r in rows), sum(r.outcome != ERROR for r in rows))
        for name, rows in sorted(found.items())
    ]


def _texts(t: Trajectory) -> list[tuple[str, str]]:
    """Every text of a rollout by the name that addresses have for it."""
    tools: dict[str, str] = {}
    found = [
        (f"{number}:{part}", text)
        for number, message in enumerate(t.messages)
        for part, (_, _, text) in enumerate(conversation.texts(message, tools))
    ]
    found += [(f"check:{name}:{of}", pretty(check.get(of))) for name, check in t.checks.items() for of in ("expected", "actual")]
    return [*found, ("hint", pretty((t.hint or {}).get("text") or "")), ("fault", pretty((t.error or {}).get("message") or ""))]


def _url(page: str, key: str = "", /, **parameters: Any) -> str:
    """An address on this server."""
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    path = urllib.parse.quote(key, safe="/", errors="replace")
    return f"/{page}{'/' if key else ''}{path}{'?' if given else ''}{urllib.parse.urlencode(given, errors='replace')}"
