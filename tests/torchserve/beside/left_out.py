"""TorchServe's example handlers that are not run in the comparison, and why."""

from __future__ import annotations

_SAMPLES = "samples without a seed: no two answers are the same"
_WORKFLOW = "a function of a workflow; our server does not run workflows"
_LLAMA_CPP = "needs llama-cpp-python, which takes minutes to compile"
_DIFFUSION = "needs diffusers; starts from noise without a seed: no two answers are the same"
_NEURON = "needs AWS Inferentia"

_LARGER = "the same handler as in `resnet_18`, with larger weights"
_OPERATORS = "`object_detector` with torchvision's C++ operators, which its wheel on PyPI has for CUDA only"
_COMPILED = "`image_classifier` with a model that inductor compiles, which takes minutes"

# By the handler's path below examples/, or by the folder of an example with a built-in handler.
LEFT_OUT = {
    "image_classifier/alexnet": _LARGER,
    "image_classifier/densenet_161": _LARGER,
    "image_classifier/resnet_152_batch": _LARGER,
    "image_segmenter/deeplabv3": "the same handler as in `fcn`, with larger weights",
    "object_detector/fast-rcnn": _OPERATORS,
    "object_detector/maskrcnn": _OPERATORS,
    "pt2/torch_compile": _COMPILED,
    "pt2/torch_export_aot_compile": _COMPILED,
    "Huggingface_Transformers/Transformer_handler_generalized_neuron.py": _NEURON,
    "LLM/llama/chat_app/docker/llama_cpp_handler.py": _LLAMA_CPP,
    "LLM/llama/chat_app/llama_cpp_handler.py": _LLAMA_CPP,
    "MMF-activity-recognition/handler.py": "needs MMF, whose last release is for torch 1.11",
    "Workflows/dog_breed_classification/dog_breed_classification_handler.py": "gets the answer of another model of a "
    "workflow; our server does not run workflows",
    "Workflows/dog_breed_classification/workflow_dog_breed_classification_handler.py": _WORKFLOW,
    "Workflows/nmt_transformers_pipeline/nmt_workflow_handler_dualtranslation.py": _WORKFLOW,
    "Workflows/nmt_transformers_pipeline/nmt_workflow_handler_retranslation.py": _WORKFLOW,
    "asr_rnnt_emformer/handler.py": "needs `torchaudio.load`, which later releases have given up",
    "diffusers/stable_diffusion_handler.py": _DIFFUSION,
    "image_classifier/resnet_18/debugging_backend/test_handler.py": "a script that calls a handler without a server",
    "image_classifier/vgg_16/vgg_handler.py": "an `image_classifier` that loads its weights, which take "
    "528 MB, in another way",
    "instruction_embedding/instructor_embedding_handler.py": "needs InstructorEmbedding, which downloads its model",
    "large_models/Huggingface_accelerate/custom_handler.py": _SAMPLES,
    "large_models/Huggingface_pippy/pippy_handler.py": "needs PiPPy, and a GPU",
    "large_models/deepspeed/custom_handler.py": "needs DeepSpeed, and a GPU",
    "large_models/deepspeed_mii/DeepSpeed_mii_handler.py": "needs DeepSpeed, and a GPU",
    "large_models/deepspeed_mii/LLM/DeepSpeed_mii_handler.py": "needs DeepSpeed, and a GPU",
    "large_models/diffusion_fast/diffusion_fast_handler.py": _DIFFUSION,
    "large_models/gpt_fast/handler.py": "imports gpt-fast, a repository without a package",
    "large_models/inferentia2/llama/continuous_batching/base_neuronx_continuous_batching_handler.py": _NEURON,
    "large_models/inferentia2/llama/streamer/base_neuronx_microbatching_handler.py": _NEURON,
    "large_models/inferentia2/opt/inf2_handler.py": _NEURON,
    "large_models/ipex_llm_int8/llm_handler.py": "needs Intel's extension, made for torch 2.4",
    "large_models/segment_anything_fast/custom_handler.py": "needs segment-anything-fast, and a GPU",
    "large_models/tp_llama/llama_handler.py": "needs several GPUs, for tensor parallelism",
    "nmt_transformer/model_handler_generalized.py": "needs fairseq, and downloads its model",
    "nvidia_dali/custom_handler.py": "needs DALI, and a GPU",
    "object_detector/yolo/yolov8/custom_handler.py": "needs ultralytics, which downloads its model",
    "pt2/torch_compile_openvino/stable_diffusion/stable_diffusion_handler.py": _DIFFUSION,
    "speech2text_wav2vec2/handler.py": "needs `torchaudio.load`, which later releases have given up",
    "text_classification_with_scriptable_tokenizer/handler.py": "needs torchtext, whose last release is for torch 2.3",
    "text_to_speech_synthesizer/SpeechT5/text_to_speech_handler.py": "applies dropout: no two answers are the same",
    "text_to_speech_synthesizer/WaveGlow/waveglow_handler.py": "needs a GPU, and NVIDIA's model",
    "torch_tensorrt/torchcompile/T5/T5_handler.py": "needs TensorRT, and a GPU",
    "torchrec_dlrm/dlrm_handler.py": "needs torchrec and an fbgemm that is built for the same torch",
    "usecases/RAG_based_LLM_serving/rag_handler.py": "needs LangChain, and downloads two models",
    "usecases/llm_diffusion_serving_app/docker/llm/llm_handler.py": "needs OpenVINO; samples without a seed",
    "usecases/llm_diffusion_serving_app/docker/sd/stable_diffusion_handler.py": _DIFFUSION,
}
