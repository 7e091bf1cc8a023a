//! `rotational`: sets or clears the flag that says that the disk rotates.

use std::sync::Arc;

use blockhaul_block::Result;
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};

use blockhaul_layers::support::masked;
use blockhaul_layers::support::{layer, param_or};

/// The layer `rotational`.
pub static ROTATIONAL: LayerKind = LayerKind {
    name: "rotational",
    summary: "sets or clears the flag that says that the disk rotates, so that seeking costs time",
    manual: "Without the layer, the flag is the kernel's for the disk below. Clients order their requests by it.",
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
