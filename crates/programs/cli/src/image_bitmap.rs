//! `blockhaul bitmap`: the persistent bitmaps of a qcow2 image.

use std::ffi::OsString;

use blockhaul_block::Kind;
use blockhaul_catalog::OpenContext;
use blockhaul_formats::qcow2::bitmap_change::{BitmapChange, change_bitmap};
use blockhaul_inspect::{bitmaps_json, bitmaps_text};
use serde_json::json;

use crate::args::{self, BitmapCommand, BitmapMerge, ImageBitmap, ListArgs};
use crate::brackets::Groups;
use crate::exit::{CommandFailure, CommandResult};
use crate::image_tools::{description, holder, run};
use crate::out;

/// Runs `blockhaul bitmap`.
pub fn bitmap(args: args::BitmapArgs, groups: &Groups) -> CommandResult {
    match args.command {
        BitmapCommand::List(args) => list(&args, groups),
        BitmapCommand::Add(args) => {
            let enabled = !args.disabled;
            let change = BitmapChange::Add { granularity: args.granularity, enabled };
            changed(args.bitmap, change, groups)
        }
        BitmapCommand::Remove(args) => changed(args, BitmapChange::Remove, groups),
        BitmapCommand::Clear(args) => changed(args, BitmapChange::Clear, groups),
        BitmapCommand::Enable(args) => changed(args, BitmapChange::Enable, groups),
        BitmapCommand::Disable(args) => changed(args, BitmapChange::Disable, groups),
        BitmapCommand::Merge(args) => {
            let BitmapMerge { bitmap, sources, from } = args;
            let from = from.map(|from| image(&from, groups)).transpose()?;
            changed(bitmap, BitmapChange::Merge { sources, from }, groups)
        }
    }
}

fn list(args: &ListArgs, groups: &Groups) -> CommandResult {
    let found = description(args, groups)?;
    let value = json!({ "bitmaps": bitmaps_json(&found) });
    out::result(args.json, &value, &bitmaps_text(&found))?;
    Ok(0)
}

/// The device that holds the image of a word.
fn image(word: &OsString, groups: &Groups) -> Result<String, CommandFailure> {
    Ok(holder(groups.spec(word)?)?.to_string())
}

fn changed(args: ImageBitmap, change: BitmapChange, groups: &Groups) -> CommandResult {
    let name = image(&args.image, groups)?;
    let described = name.clone();
    let result = run(move |registry| async move {
        let context = OpenContext::new(&registry);
        change_bitmap(&context, &described, &args.name, change).await
    })?;
    result.map_err(|error| match error.kind() {
        Kind::Usage => CommandFailure::usage(error.to_string()),
        _ => CommandFailure::opening("image", &name, &error),
    })?;
    Ok(0)
}
