import asyncio
from threading import Thread

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse, ResponseOutput
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer


def count(name, value):
    return ResponseOutput(name=name, datatype="UINT32", shape=[1], data=[value])


class Runtime(MLModel):
    async def load(self):
        self.tokenizer = AutoTokenizer.from_pretrained(self.settings.parameters.uri)
        self.model = AutoModelForCausalLM.from_pretrained(self.settings.parameters.uri, dtype="bfloat16")
        return True

    def generate(self, done, **options):
        done["ids"] = self.model.generate(**options, do_sample=False)

    async def predict_stream(self, payloads):
        async for payload in payloads:
            new = payload.parameters.max_tokens
            encoded = self.tokenizer(StringCodec.decode_input(payload.inputs[0])[0], return_tensors="pt")
            streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True)
            done = {}
            options = {"streamer": streamer, "max_new_tokens": new, "min_new_tokens": new}
            thread = Thread(target=self.generate, args=(done,), kwargs={**encoded, **options})
            thread.start()
            for text in streamer:
                piece = StringCodec.encode_output("text_output", [text])
                yield InferenceResponse(model_name=self.name, outputs=[piece])
                await asyncio.sleep(0)  # or else nothing is written before the end
            thread.join()
            read = encoded["input_ids"].shape[1]
            usage = [count("num_input_tokens", read), count("num_output_tokens", done["ids"].shape[1] - read)]
            yield InferenceResponse(model_name=self.name, outputs=usage)
