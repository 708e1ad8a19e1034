"""A small OpenAI-compatible server around a local model, for the end-to-end test: `exam_server.py MODEL`.

Prints its port, then answers `/v1/chat/completions` (greedy, not streamed) until it is ended.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENIZER = AutoTokenizer.from_pretrained(sys.argv[1])
MODEL = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        inputs = TOKENIZER.apply_chat_template(
            asked["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        before = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            ids = MODEL.generate(**inputs, max_new_tokens=asked["max_tokens"], do_sample=False)[0, before:]
        stopped = bool(len(ids)) and int(ids[-1]) == MODEL.generation_config.eos_token_id
        answer = {
            "choices": [
                {
                    "message": {"role": "assistant", "content": TOKENIZER.decode(ids, skip_special_tokens=True)},
                    "finish_reason": "stop" if stopped else "length",
                }
            ],
            "usage": {"prompt_tokens": before, "completion_tokens": len(ids)},
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
