//! `rotational`: sets whether clients are told that seeking costs time.

use std::sync::Arc;

use blockhaul_block::Result;
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use blockhaul_layers::support::masked;
use blockhaul_layers::support::{layer, param_or};

/// The layer `rotational`.
pub static ROTATIONAL: LayerKind = LayerKind {
    name: "rotational",
    summary: "sets whether clients are told that the disk rotates, so that seeking costs time",
    manual: "Without the layer, clients are told what the kernel says of the disk below. A client that \
knows that a disk does not rotate, or a server that never tells it, chooses another order of requests.",
    example: r#"
blockhaul serve --layer 'rotational?rotational=on' memory:1G \
  --run 'blockhaul info --is rotational "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[param_or("rotational", ParamKind::Switch, "on", "Whether the disk rotates.")],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let rotational = args.switch("rotational");
    layer(move |inner| Ok(masked(inner, |facts| facts.rotational = rotational)))
}
