"""Images: files to pictures, pictures to rows of the text model's width, rows into a prompt.

>>> picture = read_picture("cat.png")
>>> ids = encode_chat(cfg, tokenizer, messages, [picture])
>>> out = k3jax.generate(cfg, params, [ids], images=[embed_pictures(cfg, params, [picture])])
"""

from k3jax.vision.media_config import MediaConfig, read_media_config
from k3jax.vision.picture import FORMATS, Limits, Picture, picture_of, read_picture
from k3jax.vision.prompt import encode_chat, expand
from k3jax.vision.resize import ImageSize, image_size
from k3jax.vision.splice import Media, PromptImages, media_chunk
from k3jax.vision.tower import check_vision, embed_packed, embed_pictures

__all__ = [
    "FORMATS",
    "ImageSize",
    "Limits",
    "Media",
    "MediaConfig",
    "Picture",
    "PromptImages",
    "check_vision",
    "embed_packed",
    "embed_pictures",
    "encode_chat",
    "expand",
    "image_size",
    "media_chunk",
    "picture_of",
    "read_media_config",
    "read_picture",
]
