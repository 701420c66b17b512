"""Makes protobuf message classes from tables of their fields, in a separate descriptor pool.

In protobuf's default pool they would clash with messages of the same names from MLServer or a user's package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

# By message: name -> number and type. A type with a star is repeated; one in capitals is a message or an enum.
Fields = Mapping[str, Mapping[str, tuple[int, str]]]
Enums = Mapping[str, Sequence[str]]
_Field = descriptor_pb2.FieldDescriptorProto


def message_classes(
    package: str, fields: Fields, enums: Enums, *, syntax: str = "proto3"
) -> Callable[[str], type[Message]]:
    """Maps the names of messages to their classes. The values of an enum are numbered from 0.

    With the ``syntax`` "proto2", ``HasField`` is true for a field that was sent, even if its value is 0 or empty.
    """
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(message_file(package, fields, enums, syntax).SerializeToString())

    def find(name: str) -> type[Message]:
        found: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        return found

    return find


def message_file(package: str, fields: Fields, enums: Enums, syntax: str) -> descriptor_pb2.FileDescriptorProto:
    """Returns the file that declares the messages, as protobuf describes a ``.proto`` file."""
    file = descriptor_pb2.FileDescriptorProto(name="messages.proto", package=package, syntax=syntax)
    for name, values in enums.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, described in fields.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in described.items():
            base = kind.removesuffix("*")
            label = _Field.LABEL_OPTIONAL if base == kind else _Field.LABEL_REPEATED
            added = message.field.add(name=field, number=number, label=label)
            if base in fields or base in enums:
                added.type = _Field.TYPE_MESSAGE if base in fields else _Field.TYPE_ENUM
                added.type_name = f".{package}.{base}"
            else:
                added.type = _Field.Type.Value(f"TYPE_{base.upper()}")
    return file
