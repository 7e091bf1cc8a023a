//! Lists of the objects of a service, as text and as JSON.

use std::io::{ErrorKind, Write};

use blockhaul_catalog::{ObjectEntry, ObjectList};
use blockhaul_transfer::one_line;
use serde_json::json;

use crate::error::{InspectionError, Result};

/// Writes a list page by page: a line for each object, or one value in JSON. An output that fails with
/// [`ErrorKind::BrokenPipe`] ends the list, which is not an error.
///
/// # Errors
/// The service fails, or the output cannot be written.
pub async fn write_objects(
    name: &str,
    list: &mut dyn ObjectList,
    as_json: bool,
    output: &mut impl Write,
) -> Result<()> {
    match write_pages(name, list, as_json, output).await {
        Err(InspectionError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

async fn write_pages(
    name: &str,
    list: &mut dyn ObjectList,
    as_json: bool,
    output: &mut impl Write,
) -> Result<()> {
    let mut is_first = true;
    loop {
        let page = list.page().await.map_err(|error| InspectionError::opening(name, &error))?;
        if as_json && is_first {
            write!(output, "{{\n\"device\": {},\n\"objects\": [", json!(name))?;
        }
        for object in &page {
            if as_json {
                write_member(object, std::mem::take(&mut is_first), output)?;
            } else {
                write_line(object, output)?;
            }
        }
        output.flush()?;
        if page.is_empty() {
            break;
        }
        is_first = false;
    }
    if as_json {
        output.write_all(b"\n]\n}\n")?;
    }
    Ok(())
}

/// Columns of the largest size that is usual, and of a time.
const SIZE: usize = 15;
const TIME: usize = 20;

fn write_line(object: &ObjectEntry, output: &mut impl Write) -> std::io::Result<()> {
    let ObjectEntry { name, size, changed, .. } = object;
    let changed = one_line(changed.as_deref().unwrap_or("-"));
    writeln!(output, "{size:>SIZE$}  {changed:<TIME$}  {}", one_line(name))
}

fn write_member(
    object: &ObjectEntry,
    is_first: bool,
    output: &mut impl Write,
) -> std::io::Result<()> {
    let ObjectEntry { name, size, changed, etag } = object;
    let mut value = json!({ "name": name, "size": size });
    for (member, text) in [("changed", changed), ("etag", etag)] {
        if let Some(text) = text {
            value[member] = text.as_str().into();
        }
    }
    let between = if is_first { "" } else { "," };
    write!(output, "{between}\n\t{value}")
}
