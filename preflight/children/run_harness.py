"""Runs tasks of lm-evaluation-harness (lm-eval) on a model and writes each sample's metrics.

Arguments: results file, job file (JSON): model, tasks (names), include_path (folder of YAML files, or null), limit,
device, dtype, trust_remote_code, seed, shots.
"""

import json
import sys
import time

BEGAN = time.time()


def step(name, **facts):
    facts["step"] = name
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(facts, default=str) + "\n")


def version_of(module):
    return str(getattr(module, "__version__", ""))


def main():
    with open(sys.argv[2], encoding="utf-8") as stream:
        job = json.load(stream)
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        step("import lm_eval", version=version_of(lm_eval), seconds=round(time.time() - BEGAN, 2))
    except Exception as error:
        step("failed", during="import", error=type(error).__name__, message=str(error)[:2000])
        return 1
    arguments = {"pretrained": job["model"], "dtype": job["dtype"]}
    if job.get("trust_remote_code"):
        arguments["trust_remote_code"] = True
    try:
        manager = TaskManager(include_path=job.get("include_path"))
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args=arguments,
            tasks=job["tasks"],
            num_fewshot=job.get("shots"),
            limit=job.get("limit"),
            device=job["device"],
            batch_size=1,
            task_manager=manager,
            log_samples=True,
            apply_chat_template=job.get("chat_template", False),
            random_seed=job.get("seed", 0),
            numpy_random_seed=job.get("seed", 0),
            torch_random_seed=job.get("seed", 0),
            fewshot_random_seed=job.get("seed", 0),
            bootstrap_iters=0,
        )
    except Exception as error:
        step("failed", during="run", error=type(error).__name__, message=str(error)[:2000])
        return 1
    for task, samples in (found.get("samples") or {}).items():
        for sample in samples:
            metrics = {name: sample[name] for name in sample.get("metrics") or [] if name in sample}
            if not metrics:
                metrics = {k: v for k, v in sample.items() if k in ("acc", "exact_match", "acc_norm", "f1", "em")}
            answer = sample.get("filtered_resps")
            step("harness sample", task=task, doc=sample.get("doc_id"), metrics=metrics, answer=str(answer)[:300])
    step("done", seconds=round(time.time() - BEGAN, 2), results=found.get("results"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
