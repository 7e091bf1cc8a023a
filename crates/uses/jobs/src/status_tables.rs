//! What a running server has, as tables for users: clients, exports and jobs, from replies on its control socket. What
//! peers call themselves is escaped.

use std::fmt::Write as _;

use blockhaul_control::{BitmapStatus, ClientStatus, ExportStatus, LayerStatus};
use blockhaul_transfer::one_line;
use serde_json::Value;

/// The clients, one a line.
pub fn clients_table(clients: &[ClientStatus]) -> String {
    let mut rows = vec![
        ["CLIENT", "ADDRESS", "EXPORT", "TLS", "IN FLIGHT", "READ", "WRITTEN", "REQUESTS", "AGE"]
            .map(String::from)
            .to_vec(),
    ];
    for client in clients {
        let tls = match &client.tls {
            None => "-".to_string(),
            Some(tls) => tls.name.as_deref().map_or("anybody".to_string(), safe),
        };
        let export = match &client.export {
            None => "(handshake)".to_string(),
            Some(name) => shown(name),
        };
        let leaving = if client.leaving { " (leaving)" } else { "" };
        let bytes = |kind: &str| size(client.bytes.get(kind).copied().unwrap_or_default());
        rows.push(vec![
            client.number.to_string(),
            safe(&client.address),
            export + leaving,
            tls,
            client.in_flight.to_string(),
            bytes("read"),
            bytes("write"),
            client.requests.values().sum::<u64>().to_string(),
            age(client.age),
        ]);
    }
    table(&rows)
}

/// The exports, one a line.
pub fn exports_table(exports: &[ExportStatus]) -> String {
    let header = ["EXPORT", "SIZE", "MODE", "CLIENTS", "DEVICE", "LAYERS", "BITMAPS"];
    let mut rows = vec![header.map(String::from).to_vec()];
    for export in exports {
        let device = safe(&export.device);
        rows.push(vec![
            shown(&export.name),
            export.size.map_or("-".into(), size),
            export.readonly.map_or("-", |readonly| if readonly { "ro" } else { "rw" }).into(),
            export.clients.to_string(),
            match &export.state {
                None => device,
                Some(state) => format!("{device} ({})", safe(state)),
            },
            joined(export.layers.iter().map(layer)),
            joined(export.bitmaps.iter().map(bitmap)),
        ]);
    }
    table(&rows)
}

/// A layer with its parameters.
fn layer(layer: &LayerStatus) -> String {
    let options = layer.options.iter().map(|(name, value)| format!("{name}={}", safe(value)));
    let options: Vec<_> = options.collect();
    let name = safe(&layer.name);
    if options.is_empty() { name } else { format!("{name}?{}", options.join("&")) }
}

/// A bitmap and how much is dirty in it.
fn bitmap(bitmap: &BitmapStatus) -> String {
    match bitmap {
        BitmapStatus::Inconsistent { name, inconsistent } => {
            format!("{} (inconsistent: {})", safe(name), one_line(inconsistent))
        }
        BitmapStatus::Consistent { name, dirty, .. } => {
            format!("{} ({})", safe(name), size(*dirty))
        }
    }
}

/// The cells of a list; `-` if it is empty.
fn joined(cells: impl Iterator<Item = String>) -> String {
    let cells: Vec<_> = cells.collect();
    if cells.is_empty() { "-".into() } else { cells.join(" ") }
}

/// The jobs of the reply to `jobs`, one a line, and below them the errors of those that have failed.
pub fn jobs_table(answer: &Value) -> String {
    let header =
        ["JOB", "TYPE", "EXPORT", "TARGET", "STATE", "DONE", "TOTAL", "SAVED", "DIRTY", "AGE"];
    let mut rows = vec![header.map(String::from).to_vec()];
    let mut errors = String::new();
    for job in answer["jobs"].as_array().into_iter().flatten() {
        let mut state = text(&job["state"]);
        if let Some(error) = message(&job["error"]) {
            errors += &format!("job {}: {error}\n", number(&job["job"]));
            state += &job["exit_status"].as_u64().map_or(String::new(), |of| format!(" ({of})"));
        }
        rows.push(vec![
            number(&job["job"]).to_string(),
            text(&job["type"]),
            shown(job["export"].as_str().unwrap_or_default()),
            text(&job["target"]),
            state,
            size(number(&job["done"])),
            size(number(&job["total"])),
            size(number(&job["saved"])),
            size(number(&job["dirty"])),
            age(job["seconds"].as_f64().unwrap_or_default()),
        ]);
    }
    table(&rows) + &errors
}

/// A text that is safe for a terminal: names from servers and clients are escaped.
fn safe(text: &str) -> String {
    blockhaul_wire::printable(text.as_bytes(), 4096).to_string()
}

/// The name of an export.
fn shown(name: &str) -> String {
    if name.is_empty() { "\"\"".to_string() } else { safe(name) }
}

/// A text in a value, safe for a terminal.
fn text(value: &Value) -> String {
    value.as_str().map(safe).unwrap_or_default()
}

/// A sentence of the server, on one line; names in it are quoted already.
fn message(value: &Value) -> Option<String> {
    value.as_str().map(one_line)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// Rows with columns below each other.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            // Writing to a string does not fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// Bytes in three digits.
fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["", "K", "M", "G", "T", "P"] {
        if value < 1000.0 || unit == "P" {
            let digits = usize::from(value < 9.95 && !unit.is_empty());
            return format!("{value:.digits$}{unit}");
        }
        value /= 1024.0;
    }
    bytes.to_string()
}

/// A time in its two largest units.
fn age(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..=59 => format!("{seconds:.1}s"),
        60..=3599 => format!("{}m{:02}s", whole / 60, whole % 60),
        3600..=86399 => format!("{}h{:02}m", whole / 3600, whole / 60 % 60),
        _ => format!("{}d{:02}h", whole / 86400, whole / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (bytes, shown) in
            [(0, "0"), (999, "999"), (1000, "1.0K"), (10 << 10, "10K"), (5 << 40, "5.0T")]
        {
            assert_eq!(size(bytes), shown);
        }
        for (seconds, shown) in
            [(0.25, "0.2s"), (61.0, "1m01s"), (3660.0, "1h01m"), (90000.0, "1d01h")]
        {
            assert_eq!(age(seconds), shown);
        }
    }

    #[test]
    fn what_peers_call_themselves_is_not_obeyed() {
        let client = ClientStatus {
            export: Some("\u{1b}[2J".to_string()),
            bytes: [("read".to_string(), 4096)].into(),
            ..ClientStatus::default()
        };
        let text = clients_table(&[client]);
        assert!(!text.contains('\u{1b}'), "{text}");
        assert!(text.contains("4.0K"), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}
