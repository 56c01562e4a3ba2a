"""The files of a small finished run, made up step by step, so that a test can stop after any of them."""

import random

import numpy as np

from rl.trajectory import Trajectory, encode_shard
from trace_jax.evaluate.statistics import wilson

CAPABILITIES = ["structured_data_reasoning", "multi_step_task_completion", "precondition_verification"]
REJECTED = "policy_compliance"
LAYERS = 4
_WORDS = """<|im_start|> <|im_end|> system user assistant tool _order _#12 _please _return _it . </p> <script> {"name": _"get_order" ,
_"arguments": } _I _have _checked _the _status _delivered _yes"""
PIECES = ["\n", *(word.replace("_", " ", 1) if word[0] == "_" else word for word in _WORDS.split())]  # "_": the token begins with a space


def rate(successes, n):
    low, high = wilson(successes, n)
    return {"rate": successes / n, "interval": [float(low), float(high)], "n": n, "errors": 0}


def conversation(number, hostile=""):
    return [
        {"role": "system", "content": "You serve customers. Returns are for delivered orders only."},
        {"role": "user", "content": f"Please return order #{number}."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "name": "get_order", "arguments": {"order_id": f"#{number}"}}]},
        {"role": "tool", "content": f'{{"status": "pending"}}{hostile}', "tool_call_id": "a"},
        {"role": "assistant", "content": "I have returned it."},
    ]


def trajectory(number, *, tokens=0, slots=1, layers=LAYERS, hostile=""):
    rng = np.random.default_rng(number)
    arrays = {}
    if tokens:
        mask = (np.arange(tokens) // 9) % 3 == 2
        gate = rng.integers(0, slots, (tokens // 6 + 1, layers)).repeat(6, 0)[:tokens]
        arrays = {
            "tokens": rng.integers(0, len(PIECES), tokens),
            "loss_mask": mask,
            "logprobs": np.where(mask, -0.5, 0.0),
            "turns": np.arange(tokens) // 27,
            "versions": np.zeros(tokens),
            "slots": gate,
        }
    return Trajectory(
        id=f"desk:{number}#0",
        environment="desk",
        task_id=f"desk:{number}",
        split="train",
        seed=number,
        messages=conversation(number, hostile),
        reward=float(number % 2),
        success=bool(number % 2),
        checks={"db": {"passed": bool(number % 2), "expected": {"order": hostile or "returned"}, "actual": None, "message_index": 4}},
        metrics={"tool_errors": 0.0, "turns": 2.0},
        **arrays,
    )


def held_out(number, won, hostile=""):
    """A trial of the evaluation: who wins looks at the status that the tool gave, and says no."""
    messages = conversation(number, hostile)
    if won:
        messages[4] = {"role": "assistant", "content": "It is pending, so it cannot be returned."}
    check = {"passed": won, "expected": {"order": "pending"}, "actual": {"order": hostile or "returned"}, "message_index": 4}
    checks = {"db": check} | ({"communicate:0": check | {"expected": "cannot be returned", "actual": None}} if number % 3 else {})
    return Trajectory(
        id=f"desk:{number}#0",
        environment="desk",
        task_id=f"desk:{number}",
        split="heldout",
        seed=number,
        messages=messages,
        reward=float(won),
        success=won,
        stop_reason="done" if number % 5 else "max_turns",
        checks=checks,
    )


def add_rollouts(workdir, hostile=""):
    workdir.write_shard("base", "train", 0, [trajectory(n, hostile=hostile) for n in range(6)])


def add_diagnosis(workdir, hostile=""):
    rows, labels = [], []
    for n, name in enumerate([*CAPABILITIES, REJECTED]):
        gap, kept, quote = 0.55 - 0.13 * n, name != REJECTED, "HAVE  returned" if n == 0 else ""
        rows.append(
            {
                "capability": name,
                "mean_cov": 0.42 - 0.07 * n,
                "std_cov": 0.02,
                "mean_delta": gap,
                "std_delta": 0.04,
                "er_minus": gap + 0.1,
                "er_plus": 0.1,
                "cov_interval": [0.31 - 0.07 * n, 0.52 - 0.07 * n],
                "gap_interval": [gap - 0.14, gap + 0.12],
                "alpha": None if n == 3 else 0.97,
                "applicable_failed": 61.3,
                "applicable_passed": 3.2 if n == 2 else 22.0,
                "n_runs_passed": 10 - 2 * n,
                "n_runs_total": 10,
                "passes_consistency": kept,
                "lacking": [],
                "outcome_bound": n == 1,
                "supported": n != 2,
            }
        )
        for t in range(6):
            label = {"trajectory": f"desk:{t}#0", "capability": name, "value": "PRESENT" if t % 2 else "LACKING", "message_index": 4}
            labels.append(
                {**label, "reason": f"returns the order without having seen its status {hostile}", "passed": bool(t % 2), "quote": quote}
            )
    described = {
        name: f"Does what {name.replace('_', ' ')} asks for, rather than the first thing that comes to mind." for name in CAPABILITIES
    }
    described[REJECTED] = "Follows the policy."
    workdir.write_json("diagnosis/candidates.json", {"candidates": [{"name": c, "description": d} for c, d in described.items()]})
    for label in labels:
        workdir.append_jsonl("diagnosis/evidence.jsonl", label)
    thresholds = {"coverage": 0.1, "gap": 0.2, "min_runs": 8, "runs": 10, "analyst": "evidence", "blind": False}
    figures = {
        "passed": 96,
        "failed": 224,
        "errors": {},
        "do_nothing": ["desk:7"],
        "passed_do_nothing": 2,
        "notes": ["Runs differ in draws."],
        "agreement": [
            {"capability": CAPABILITIES[0], "pairs": 40, "same": 0.9, "alpha": 0.81, "counts": [], "differ": ["desk:3#0"]},
            {"capability": CAPABILITIES[1], "pairs": 0, "same": None, "alpha": None, "counts": [], "differ": []},
        ],
    }
    workdir.write_json("diagnosis/figures.json", {**figures, "thresholds": thresholds, "capabilities": rows})
    keys = ("mean_cov", "std_cov", "mean_delta", "std_delta", "n_runs_passed", "n_runs_total", "passes_consistency")
    rest = {"example_failed_cases": ["desk:0#0"], "status": "PENDING"}
    selection = [
        {"skill": r["capability"], "description": described[r["capability"]], **{k: r[k] for k in keys}, **rest}
        for r in rows
        if r["passes_consistency"]
    ]
    workdir.write_json("diagnosis/selected_capabilities.json", selection)


def add_environments(workdir):
    for n, name in enumerate(CAPABILITIES):
        shares = {str(1_000_000 + seed): random.Random(seed + n).choice([0, 0.125, 0.25, 0.375, 0.5, 0.625, 1.0]) for seed in range(40)}
        package = {
            "name": f"desk_{name}",
            "capability": name,
            "target": "desk",
            "version": "1",
            "max_turns": 10,
            "knobs": {"records": {"default": 3 if n == 2 else 4, "min": 3, "max": 6}},
        }
        checks = [
            {"name": check, "passed": True, "detail": "reward 1 on 50 of 50 seeds"} for check in ("oracle", "say_done", "seeds_differ")
        ]
        checks.append({"name": "tools", "passed": None, "detail": "not compared: no target given"})
        workdir.write_json(f"environments/{name}/package.json", {**package, "rationale": "What is learned is to look before acting."})
        workdir.write_json(
            f"environments/{name}/certificate.json",
            {"passed": True, "checks": checks, "rewards": {"oracle": {"mean": 1.0, "success": 1.0}, "echo": {"mean": 0.1, "success": 0.0}}},
        )
        calibration = {
            "n_rollouts": 320,
            "mean_reward": 0.36 + 0.02 * n,
            "std_reward": 0.42,
            "success_rate": 0.33 - 0.1 * n,
            "success_interval": [0.28 - 0.1 * n, 0.38 - 0.1 * n],
            "zero_rate": 0.5,
            "partial_rate": 0.15,
            "groups_all_perfect": 0.05,
            "groups_all_zero": 0.12 + 0.07 * n,
            "groups_mixed": 0.8,
            "constant_share": 0.2,
            "per_seed": shares,
            "verdict": "too_hard" if n == 2 else "ok",
            "reasons": ["success_rate 0.130 is below 0.2"] if n == 2 else [],
            "hint_ratio": 0.25 if n == 2 else 0.0,
            "usable": True,
        }
        if n:  # as an earlier release wrote it, without these
            calibration |= {"mean_interval": [0.3, 0.45], "looks": [{"seeds": 40, "rollouts": 320, "certain": None}], "stopped": n == 1}
            calibration |= {
                "spent": 320 + 448 * (n == 2),
                "knobs": {"records": 3 if n == 2 else 4},
                "search": [],
                "harder": {"records": "max"},
            }
        if n == 2:
            tried = {"success_interval": [0.05, 0.2], "mean_reward": 0.2, "n_rollouts": 320, "verdict": "too_hard", "note": ""}
            calibration["search"] = [tried | {"knobs": {"records": k}, "success_rate": 0.03 * (7 - k)} for k in (4, 3)]
            hinted = {"n_rollouts": 64, "success_rate": 0.5, "success_interval": [0.38, 0.62], "mean_reward": 0.5, "band": [0.6, 0.8]}
            calibration["hinted"] = hinted | {"note": "success with a hint is 0.500, outside of 0.6 to 0.8: it tells too little"}
        workdir.write_json(f"environments/{name}/calibration.json", calibration)
        if n == 1:
            rounds = [
                {"round": 1, "kind": "generation", "reasons": ["environment.py:3: import of 'socket'"]},
                {"round": 2, "kind": "repair", "reasons": []},
            ]
            workdir.write_json(f"environments/{name}/generation.json", {"status": "usable", "model": "some-model", "rounds": rounds})


def add_training(workdir, iterations=24):
    for n, name in enumerate(CAPABILITIES):
        for step in range(iterations):
            noise = random.Random(100 * n + step).random
            reward = min(1.0, 0.35 + 0.6 * (1 - 0.85**step)) - 0.08 * noise()
            row = {"step": step, "reward": reward, "success": max(reward - 0.08, 0), "entropy": 0.9 * 0.96**step + 0.05 * noise()}
            row |= {
                "engine_gap": 2e-7 * noise(),
                "clip_share": 0.0,
                "dual_clip_share": 0.0,
                "masked_share": 0.01 * noise(),
                "sampled_tokens": 80 - step,
                "tool_errors": 0.5 * noise(),
                "truncated": 0.0,
                "base_k3": 0.004 * step if step % 4 == 0 else None,
                "turns": 3 + noise(),
            }
            workdir.append_jsonl(
                f"adapters/{name}/metrics.jsonl", row | {"policy_lag": 0, "seconds/rollout": 1.3 + noise(), "seconds/update": 0.4}
            )
        summary = {"capability": name, "iterations": iterations, "rollouts": 64 * iterations}
        workdir.write_json(f"adapters/{name}/summary.json", summary | {"before": rate(21 - 2 * n, 64), "after": rate(58 - n, 64)})
    agreement = {"engine": "jax", "rank": 8, "bound": 0.02, "sequences": 64, "tokens": 1098, "mean": 4.7e-7, "largest": 4.5e-6}
    workdir.write_json("agreement.json", agreement | {"adapter_effect": 0.132, "refused": 0})


def add_gate(workdir, kept=True, hostile=""):
    slots = ["base", *CAPABILITIES]
    for step in range(12):
        workdir.append_jsonl(
            "gate/metrics.jsonl", {"step": step, "reward": 0.6 + 0.02 * step, "success": 0.55 + 0.02 * step, "loss": -0.01}
        )
    validation = {"base": rate(70, 192), **{f"adapter:{c}": rate(100 + 8 * n, 192) for n, c in enumerate(CAPABILITIES)}}
    validation |= {
        "uniform": rate(105, 192),
        "router": rate(150, 192),
        "plain_gate": rate(131, 192),
        "gate": rate(163 if kept else 110, 192),
    }
    form = {"accuracy": 0.71, "accuracy_weighted": 0.86, "entropy": 0.41, "turn_agreement": 0.83, **{f"share/{n}": 0.25 for n in range(4)}}
    routing = {
        "slots": slots,
        "success_table": {c: {s: 0.9 - 0.05 * n if s == c else 0.4 for s in slots} for n, c in enumerate(CAPABILITIES)},
        "label_form": {"kl_weighted": form, "plain": form | {"accuracy": 0.62}},
        "constant_scale": 0.5,
        "validation": validation,
        "kept": kept,
        "composed": "gate" if kept else "adapter:precondition_verification",
        "accuracy": 0.71,
        "accuracy_weighted": 0.86,
        "entropy": 0.41,
        "turn_agreement": 0.83,
        "share": dict(zip(slots, [0.31, 0.27, 0.24, 0.18, *[0.0] * len(slots)], strict=False)),
    }
    workdir.write_json("gate/routing.json", routing)
    if kept:
        shown = [trajectory(n, tokens=220 + 20 * n, slots=len(slots), hostile=hostile) for n in range(1, 5)]
        workdir.write_bytes("gate/examples.jsonl.zst", encode_shard(shown))
        workdir.write_json("gate/pieces.json", PIECES)


def add_evaluation(workdir, n=400, hostile=""):
    policies = {
        "base": 0.31,
        "do_nothing": 0.01,
        "uniform": 0.44,
        "constant": 0.47,
        "router": 0.58,
        "plain_gate": 0.52,
        "composed": 0.66,
        "grpo_target": 0.55,
    }
    policies |= {f"adapter:{c}": 0.38 + 0.06 * k for k, c in enumerate(CAPABILITIES)}
    for policy, chance in policies.items():
        rng = random.Random(policy)
        won = {f"desk:{9_000_000 + task}": int(rng.random() < chance) for task in range(n)}
        tasks = {task: {"trials": 1, "successes": success} for task, success in won.items()}
        overall = rate(sum(won.values()), n) | {"pass_hat": {"1": sum(won.values()) / n}}
        extra = {"training_rollouts": 8640} if policy == "grpo_target" else {}
        data = {"policy": policy, "split": "heldout", "temperature": 0.7, "rollouts": n, "tasks": tasks, "overall": overall, **extra}
        workdir.write_json(f"evaluation/{policy.replace(':', '-')}.json", data)
        if policy in ("base", "composed"):
            kept = list(enumerate(won.values()))[:80]  # of the others the rollouts are gone
            workdir.write_shard(policy, "heldout", 0, [held_out(9_000_000 + k, bool(w), hostile) for k, w in kept])
    curve = {"rollouts": [1440 * k for k in range(1, 7)], "rate": [0.36, 0.41, 0.47, 0.5, 0.53, 0.55]}
    workdir.write_json("evaluation/grpo_target_curve.json", curve)


def add_comparison(workdir):
    """What `trace-jax compare` adds."""
    change = {"difference": 0.24, "interval": [0.18, 0.3], "p": 0.0004}
    policies = [
        ("base", 0.31, None, 0, 0, 0, ""),
        ("grpo_target", 0.55, change, 5952, 241_000, 0, ""),
        ("single:precondition_verification", 0.5, change | {"difference": 0.19}, 2176, 90_000, 0, "the adapter of step 3"),
        ("gepa", 0.4, change | {"difference": 0.09, "interval": [-0.01, 0.19], "p": 0.08}, 2000, 80_000, 1_250_000, ""),
        ("composed", 0.66, change | {"difference": 0.35}, 6001, 250_000, 0, ""),
    ]
    keys = ("policy", "rate", "to_base", "rollouts", "sampled_tokens", "agent_tokens", "note")
    rows = [dict(zip(keys, row, strict=True)) | {"interval": [row[1] - 0.05, row[1] + 0.05], "n": 400} for row in policies]
    points = {
        name: [
            {"capabilities": CAPABILITIES[:k], "rate": r, "interval": [r - 0.05, r + 0.05], "rollouts": 2000 * k}
            for k, r in enumerate(rates)
        ]
        for name, rates in {"composed": [0.31, 0.45, 0.58, 0.66], "gepa": [0.4, 0.41, 0.42, 0.42]}.items()
    }
    result = {
        "target": "desk",
        "budget": 6001,
        "policies": rows,
        "left_out": {"swe_rl": "does not apply: desk and its capability environments have no patches to compare"},
        "leak": [],
        "against_rollouts": {
            "grpo_target": {"rollouts": [0, 1440, 2880, 5952], "rate": [0.31, 0.41, 0.5, 0.55]},
            "composed": {"rollouts": [0, 2000, 4000, 6001], "rate": [0.31, 0.45, 0.58, 0.66]},
        },
        "against_capabilities": points,
    }
    workdir.write_json("evaluation/comparison.json", result)


def add_sandbox(workdir):
    layers = ["namespaces", "uid", "limits", "no_new_privs", "seccomp"]
    workdir.write_json("sandbox.json", {"mode": "best_effort", "layers": layers, "missing": {"landlock": "the kernel has none"}})


def add_costs(workdir):
    seconds = {"rollouts": 21.0, "diagnose": 2.1, "synthesize": 55.0, "train": 204.0, "compose": 118.0, "evaluate": 96.0}
    stages = {name: {"seconds": s, "rollouts": int(15 * s), "sampled_tokens": int(600 * s)} for name, s in seconds.items()}
    total = {key: sum(stage[key] for stage in stages.values()) for key in ("seconds", "rollouts", "sampled_tokens")}
    agents = {"requests": 1640, "input_tokens": 12_300_000, "output_tokens": 410_000, "cost": 4.1, "estimated": 0}
    devices = [
        {"platform": "tpu", "kind": "TPU v5 lite", "count": 16, "seconds": 3600.0},
        {"platform": "cpu", "kind": "cpu", "count": 1, "seconds": 60.0},
    ]
    workdir.write_json("spent.json", {"stages": stages, "total": total, "devices": devices, "agents": agents})


def add_all(workdir, hostile="", iterations=24):
    add_rollouts(workdir, hostile)
    add_diagnosis(workdir, hostile)
    add_environments(workdir)
    add_training(workdir, iterations)
    add_gate(workdir, hostile=hostile)
    add_evaluation(workdir, hostile=hostile)
    add_comparison(workdir)
    add_sandbox(workdir)
    add_costs(workdir)
