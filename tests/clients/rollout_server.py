"""Simulates an SGLang server: generates tokens, and loads weights from the path in a request. Run as a program."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
import transformers


class Handler(BaseHTTPRequestHandler):
    model = None
    loaded = 0

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = getattr(self, self.path.strip("/"))(**asked)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def update_weights_from_disk(self, model_path):
        Handler.model = transformers.AutoModelForCausalLM.from_pretrained(model_path).eval()
        Handler.loaded += 1
        return {"success": True}

    @torch.no_grad()
    def generate(self, input_ids, return_logprob, sampling_params):
        assert return_logprob
        answers = []
        for row in input_ids:
            tokens, reply = list(row), []
            for _ in range(sampling_params["max_new_tokens"]):
                logits = Handler.model(torch.tensor([tokens])).logits[0, -1] / sampling_params.get("temperature", 1.0)
                logprobs = logits.log_softmax(-1)
                token = int(torch.multinomial(logprobs.exp(), 1))
                reply.append([float(logprobs[token]), token, None])
                tokens.append(token)
            answers.append({"meta_info": {"output_token_logprobs": reply}})
        return answers

    def count(self):
        return {"loaded": Handler.loaded}

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()
