"""A GGUF file in another weight format: every matrix of it is dequantized and quantized anew. Arguments: source,
target, F16, Q8_0 or Q4_0. The embedding, also the output matrix, keeps 8 bits under Q4_0, much as llama.cpp does."""

import os
import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize


def main() -> None:
    source, target, name = sys.argv[1:]
    reader = GGUFReader(source)
    kind = GGMLQuantizationType[name]
    scratch = f"{target}.tmp"
    writer = GGUFWriter(scratch, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        matrix = len(tensor.shape) > 1
        of = GGMLQuantizationType.Q8_0 if name == "Q4_0" and tensor.name == "token_embd.weight" else kind
        data = quantize(values, of) if matrix else values.astype(np.float32)
        writer.add_tensor(tensor.name, data, raw_dtype=of if matrix else GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(scratch, target)


if __name__ == "__main__":
    main()
