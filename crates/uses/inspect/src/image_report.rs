//! Images and the results of checks of them, as text and as JSON.

use std::fmt::Write as _;

use blockhaul_formats::qcow2::check::ImageCheckReport;
use blockhaul_formats::qcow2::describe::{
    BitmapDescription, ChainLink, Qcow2Description, SnapshotDescription,
};
use blockhaul_transfer::one_line;
use serde_json::{Value, json};

/// The internal snapshots of an image, a line for each: identifier, size of the disk in bytes, and name.
pub fn snapshots_text(image: &Qcow2Description) -> String {
    let line = |one: &SnapshotDescription| {
        format!("{}\t{}\t{}\n", one_line(&one.id), one.size, one_line(&one.name))
    };
    image.snapshots.iter().map(line).collect()
}

/// The internal snapshots of an image, as JSON.
pub fn snapshots_json(image: &Qcow2Description) -> Vec<Value> {
    let one =
        |one: &SnapshotDescription| json!({ "id": one.id, "name": one.name, "size": one.size });
    image.snapshots.iter().map(one).collect()
}

/// The state of a bitmap, for users.
fn bitmap_state(bitmap: &BitmapDescription) -> &'static str {
    match (bitmap.in_use, bitmap.enabled) {
        (true, _) => "in use",
        (false, true) => "enabled",
        (false, false) => "disabled",
    }
}

/// The bitmaps of an image, a line for each: state, granularity in bytes, and name.
pub fn bitmaps_text(image: &Qcow2Description) -> String {
    let line = |one: &BitmapDescription| {
        format!("{}\t{}\t{}\n", bitmap_state(one), one.granularity, one_line(&one.name))
    };
    image.bitmaps.iter().map(line).collect()
}

/// The bitmaps of an image, as JSON.
pub fn bitmaps_json(image: &Qcow2Description) -> Vec<Value> {
    let one = |one: &BitmapDescription| {
        json!({
            "name": one.name,
            "granularity": one.granularity,
            "enabled": one.enabled,
            "in-use": one.in_use,
        })
    };
    image.bitmaps.iter().map(one).collect()
}

/// An image of a chain, as JSON.
pub fn image_link_json(link: &ChainLink) -> Value {
    let format = link.format.as_deref();
    let Some(image) = &link.image else {
        return json!({ "image": link.name, "format": format, "file-length": link.len });
    };
    json!({
        "image": link.name,
        "format": format,
        "file-length": link.len,
        "virtual-size": image.size,
        "version": image.version,
        "cluster-size": image.cluster,
        "refcount-bits": image.refcount_bits,
        "compression-type": image.compression,
        "extended-l2": image.subclusters,
        "dirty-flag": image.dirty,
        "corrupt": image.corrupt,
        "backing-file": image.backing,
        "backing-format": image.backing_format,
        "data-file": image.data_file,
        "data-file-raw": image.data_file_raw,
        "snapshots": snapshots_json(image),
        "bitmaps": bitmaps_json(image),
    })
}

/// An image of a chain, in lines.
pub fn image_link_text(link: &ChainLink) -> String {
    let mut text = format!(
        "{}: {}\n\tfile length: {}\n",
        one_line(&link.name),
        link.format.as_deref().map_or("format not given".into(), one_line),
        link.len
    );
    let Some(image) = &link.image else { return text };
    let mut line = |name: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(text, "\t{name}: {}", one_line(&value.to_string()));
    };
    line("size", &image.size);
    line("version", &image.version);
    line("cluster size", &image.cluster);
    line("refcount bits", &image.refcount_bits);
    line("compression", &image.compression);
    line("subclusters", &image.subclusters);
    for (flag, name) in [(image.dirty, "dirty"), (image.corrupt, "corrupt")] {
        if flag {
            line(name, &"yes");
        }
    }
    let named = [("backing file", &image.backing), ("backing format", &image.backing_format)];
    for (name, value) in named.into_iter().chain([("data file", &image.data_file)]) {
        if let Some(value) = value {
            line(name, value);
        }
    }
    for one in &image.snapshots {
        line("snapshot", &format!("{} {} ({} bytes)", one.id, one.name, one.size));
    }
    for one in &image.bitmaps {
        let state = bitmap_state(one);
        line("bitmap", &format!("{} ({state}, granularity {})", one.name, one.granularity));
    }
    text
}

/// The result of a check, in lines.
pub fn check_text(report: &ImageCheckReport) -> String {
    let mut text = String::new();
    for fault in &report.faults {
        text += &format!("{}\n", one_line(&fault.to_string()));
    }
    let fixed = [(report.corruptions_fixed, "corruptions"), (report.leaks_fixed, "leaks")];
    for (count, what) in fixed.into_iter().filter(|(count, _)| *count > 0) {
        text += &format!("repaired: {count} {what}\n");
    }
    text += &match (report.corruptions, report.leaks) {
        (0, 0) => "no faults".to_string(),
        (corruptions, leaks) => format!("corruptions: {corruptions}, leaked clusters: {leaks}"),
    };
    let ImageCheckReport { allocated, clusters, compressed, image_end, .. } = report;
    let dirty = if report.is_dirty { ", marked as dirty" } else { "" };
    text += &format!(
        "; {allocated} of {clusters} clusters allocated, {compressed} compressed, {image_end} bytes in \
         use{dirty}\n"
    );
    text
}

/// The result of the check of the image `name`, as JSON.
pub fn check_json(name: &str, report: &ImageCheckReport) -> Value {
    json!({
        "image": name,
        "format": "qcow2",
        "corruptions": report.corruptions,
        "leaks": report.leaks,
        "corruptions-fixed": report.corruptions_fixed,
        "leaks-fixed": report.leaks_fixed,
        "total-clusters": report.clusters,
        "allocated-clusters": report.allocated,
        "compressed-clusters": report.compressed,
        "image-end-offset": report.image_end,
        "dirty": report.is_dirty,
        "messages": report.faults.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}
