//! `blockhaul ctl`: manages a running server through its control socket (`serve::control`).

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use blockhaul_control::ControlRequest;
use serde_json::Value;

use crate::args::{self, CtlCommand};
use crate::exit::{FAILED, Failure, LOST, OPEN, Outcome, USAGE, plain};
use crate::out;

/// Maximum reply: ten thousand clients need a few MiB.
const ANSWER_MAX: u64 = 256 << 20;

/// Runs `blockhaul ctl`.
pub fn run(args: &args::Ctl) -> Outcome {
    let mut server = Connection::open(&args.socket, args.timeout)?;
    let json = args.json;
    if let &CtlCommand::JobWait { job, ready } = &args.command {
        return wait_for_job(&mut server, job, ready, json);
    }
    let mut reply = Value::Null;
    for request in args.command.requests()? {
        reply = server.ask(&request)?;
    }
    match &args.command {
        CtlCommand::Clients => tell(&reply, json, clients),
        CtlCommand::Exports => tell(&reply, json, exports),
        CtlCommand::Jobs => tell(&reply, json, jobs),
        CtlCommand::Disconnect { number } => {
            tell(&reply, json, |reply| match reply["done"].as_str() {
                Some("cut") => format!("client {number} is disconnected\n"),
                _ => {
                    format!("client {number} will be disconnected when its requests are answered\n")
                }
            })
        }
        CtlCommand::Reload => {
            tell(&reply, json, |reply| message(&reply["done"]).unwrap_or_default() + "\n")
        }
        // The server's own lines; names in them are escaped.
        CtlCommand::Metrics => {
            tell(&reply, json, |reply| reply["text"].as_str().unwrap_or_default().to_string())
        }
        CtlCommand::Drain { wait } => {
            tell(&reply, json, |reply| {
                let there = match number(&reply["clients"]) {
                    0 => "no client is connected".to_string(),
                    1 => "1 client is connected".to_string(),
                    more => format!("{more} clients are connected"),
                };
                format!("no more clients are accepted; {there}\n")
            })?;
            server.wait(*wait)
        }
        CtlCommand::Stop { wait } => {
            tell(&reply, json, |_| String::new())?;
            server.wait(*wait)
        }
        CtlCommand::Backup { wait, .. } => {
            let jobs = match reply["jobs"].as_array() {
                None => vec![number(&reply["job"])],
                Some(jobs) => jobs.iter().map(|job| number(&job["job"])).collect(),
            };
            if *wait {
                return wait_for_jobs(&mut server, &jobs, json);
            }
            tell(&reply, json, |_| {
                jobs.iter().map(|job| format!("job {job} has begun\n")).collect()
            })
        }
        CtlCommand::Mirror { wait: true, .. } => {
            wait_for_job(&mut server, number(&reply["job"]), true, json)
        }
        CtlCommand::Mirror { .. } => {
            tell(&reply, json, |reply| format!("job {} has begun\n", reply["job"]))
        }
        CtlCommand::JobComplete { job, wait: true, .. } => {
            wait_for_job(&mut server, *job, false, json)
        }
        _ => tell(&reply, json, |_| String::new()),
    }
}

/// Waits until a job has ended, or is `ready`; the status is that of the job, 0 while it runs.
fn wait_for_job(server: &mut Connection<'_>, job: u64, ready: bool, json: bool) -> Outcome {
    server.wait_long()?;
    let answer = server.ask(&ControlRequest::JobWait { job, ready })?;
    if ready && answer["exit_status"].is_null() {
        return tell(&answer, json, |_| format!("job {job} is ready\n"));
    }
    let status = answer["exit_status"].as_u64().and_then(|status| u8::try_from(status).ok());
    match (status, message(&answer["error"])) {
        (Some(status), Some(error)) if !json => Err(Failure::new(status, error)),
        (status, _) => {
            tell(&answer, json, |answer| message(&answer["result"]).unwrap_or_default() + "\n")?;
            Ok(status.unwrap_or(FAILED))
        }
    }
}

/// Waits until several jobs have ended; the status is the first that is not 0.
fn wait_for_jobs(server: &mut Connection<'_>, jobs: &[u64], json: bool) -> Outcome {
    let mut outcome = Ok(0);
    for job in jobs {
        let ended = wait_for_job(server, *job, false, json);
        if matches!(outcome, Ok(0)) {
            outcome = ended;
        }
    }
    outcome
}

/// Prints a reply: as JSON, or as text.
fn tell(answer: &Value, json: bool, text: impl Fn(&Value) -> String) -> Outcome {
    let text = if json { format!("{answer}\n") } else { text(answer) };
    out::print(text.as_bytes())?;
    Ok(0)
}

/// A connection to a control socket.
struct Connection<'a> {
    path: &'a Path,
    stream: BufReader<UnixStream>,
}

impl<'a> Connection<'a> {
    fn open(path: &'a Path, timeout: Duration) -> Result<Connection<'a>, Failure> {
        let cannot = |error: std::io::Error| {
            let next = match error.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                    ": start the server with --control and this path"
                }
                ErrorKind::PermissionDenied => ": run this as the user that runs the server",
                _ => "",
            };
            let path = path.display();
            Failure::new(
                OPEN,
                format!("cannot connect to a server at {path}: {}{next}", plain(&error)),
            )
        };
        let stream = UnixStream::connect(path).map_err(cannot)?;
        let patience = (!timeout.is_zero()).then_some(timeout);
        stream.set_read_timeout(patience).map_err(cannot)?;
        stream.set_write_timeout(patience).map_err(cannot)?;
        Ok(Connection { path, stream: BufReader::new(stream) })
    }

    /// The reply to a request.
    fn ask(&mut self, request: &ControlRequest) -> Result<Value, Failure> {
        let lost = |why: &str| {
            let text = format!("no reply from the server at {}: {why}", self.path.display());
            Failure::new(LOST, text)
        };
        let io = |error: std::io::Error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                lost("timeout; use a longer --timeout, or check the messages of the server")
            }
            _ => lost(&plain(&error)),
        };
        self.send(request).map_err(io)?;
        let mut line = Vec::new();
        self.stream.by_ref().take(ANSWER_MAX).read_until(b'\n', &mut line).map_err(io)?;
        if !line.ends_with(b"\n") {
            return Err(lost("it has closed the connection; check its messages"));
        }
        let answer: Value = serde_json::from_slice(&line)
            .map_err(|_| lost("the reply is not JSON: is this the control socket of a server?"))?;
        if answer["ok"] == Value::Bool(true) {
            return Ok(answer);
        }
        let status = match answer["kind"].as_str() {
            Some("usage") => USAGE,
            Some("absent") => OPEN,
            _ => FAILED,
        };
        Err(Failure::new(
            status,
            answer["error"].as_str().unwrap_or("the server refused the command"),
        ))
    }

    fn send(&mut self, request: &ControlRequest) -> std::io::Result<()> {
        let line = serde_json::to_string(request)? + "\n";
        self.stream.get_mut().write_all(line.as_bytes())
    }

    /// The next reply may take any time.
    fn wait_long(&mut self) -> Result<(), Failure> {
        let set = self.stream.get_mut().set_read_timeout(None);
        set.map_err(|error| Failure::new(LOST, plain(&error)))
    }

    /// Waits until the server has ended, if requested.
    fn wait(mut self, wanted: bool) -> Outcome {
        if !wanted {
            return Ok(0);
        }
        let lost = |error: std::io::Error| {
            let text = format!("cannot wait for the end of the server: {}", plain(&error));
            Failure::new(LOST, text)
        };
        self.stream.get_mut().set_read_timeout(None).map_err(lost)?;
        let asked = self.send(&ControlRequest::Wait);
        let ended = |error: &std::io::Error| {
            matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
        };
        match asked.and_then(|()| self.stream.read(&mut [0]).map(drop)) {
            Err(error) if !ended(&error) => Err(lost(error)),
            _ => Ok(0),
        }
    }
}

fn clients(answer: &Value) -> String {
    let mut rows = vec![
        ["CLIENT", "ADDRESS", "EXPORT", "TLS", "IN FLIGHT", "READ", "WRITTEN", "REQUESTS", "AGE"]
            .map(String::from)
            .to_vec(),
    ];
    for client in answer["clients"].as_array().into_iter().flatten() {
        let requests = client["requests"].as_object().into_iter().flatten();
        let requests: u64 = requests.map(|(_, count)| number(count)).sum();
        let tls = match &client["tls"] {
            Value::Null => "-".to_string(),
            tls => text(&tls["name"]).unwrap_or_else(|| "anybody".to_string()),
        };
        let export = match text(&client["export"]) {
            None => "(handshake)".to_string(),
            Some(name) if name.is_empty() => "\"\"".to_string(),
            Some(name) => name,
        };
        let leaving = if client["leaving"] == Value::Bool(true) { " (leaving)" } else { "" };
        rows.push(vec![
            number(&client["number"]).to_string(),
            text(&client["address"]).unwrap_or_default(),
            export + leaving,
            tls,
            number(&client["in_flight"]).to_string(),
            size(number(&client["bytes"]["read"])),
            size(number(&client["bytes"]["write"])),
            requests.to_string(),
            age(client["age"].as_f64().unwrap_or_default()),
        ]);
    }
    table(&rows)
}

fn exports(answer: &Value) -> String {
    let header = ["EXPORT", "SIZE", "MODE", "CLIENTS", "DEVICE", "LAYERS", "BITMAPS"];
    let mut rows = vec![header.map(String::from).to_vec()];
    for export in answer["exports"].as_array().into_iter().flatten() {
        let layers = export["layers"].as_array().into_iter().flatten().map(|layer| {
            let options = layer["options"].as_object().into_iter().flatten();
            let options: Vec<_> = options
                .map(|(name, value)| format!("{name}={}", text(value).unwrap_or_default()))
                .collect();
            let name = text(&layer["name"]).unwrap_or_default();
            if options.is_empty() { name } else { format!("{name}?{}", options.join("&")) }
        });
        let layers: Vec<_> = layers.collect();
        rows.push(vec![
            text(&export["name"]).filter(|name| !name.is_empty()).unwrap_or_else(|| "\"\"".into()),
            export["size"].as_u64().map_or("-".into(), size),
            match export["readonly"].as_bool() {
                None => "-",
                Some(true) => "ro",
                Some(false) => "rw",
            }
            .into(),
            number(&export["clients"]).to_string(),
            match text(&export["state"]) {
                None => text(&export["device"]).unwrap_or_default(),
                Some(state) => format!("{} ({state})", text(&export["device"]).unwrap_or_default()),
            },
            if layers.is_empty() { "-".into() } else { layers.join(" ") },
            bitmaps(&export["bitmaps"]),
        ]);
    }
    table(&rows)
}

/// Bitmaps and how much is dirty in each.
fn bitmaps(all: &Value) -> String {
    let shown = all.as_array().into_iter().flatten().map(|bitmap| {
        let name = text(&bitmap["name"]).unwrap_or_default();
        match message(&bitmap["inconsistent"]) {
            Some(why) => format!("{name} (inconsistent: {why})"),
            None => format!("{name} ({})", size(number(&bitmap["dirty"]))),
        }
    });
    let shown: Vec<_> = shown.collect();
    if shown.is_empty() { "-".into() } else { shown.join(" ") }
}

fn jobs(answer: &Value) -> String {
    let header =
        ["JOB", "TYPE", "EXPORT", "TARGET", "STATE", "DONE", "TOTAL", "SAVED", "DIRTY", "AGE"];
    let mut rows = vec![header.map(String::from).to_vec()];
    for job in answer["jobs"].as_array().into_iter().flatten() {
        rows.push(vec![
            number(&job["job"]).to_string(),
            text(&job["type"]).unwrap_or_default(),
            text(&job["export"]).filter(|name| !name.is_empty()).unwrap_or_else(|| "\"\"".into()),
            text(&job["target"]).unwrap_or_default(),
            match message(&job["error"]) {
                None => text(&job["state"]).unwrap_or_default(),
                Some(error) => format!("{}: {error}", text(&job["state"]).unwrap_or_default()),
            },
            size(number(&job["done"])),
            size(number(&job["total"])),
            size(number(&job["saved"])),
            size(number(&job["dirty"])),
            age(job["seconds"].as_f64().unwrap_or_default()),
        ]);
    }
    table(&rows)
}

/// Text of a value, safe for a terminal: names from servers and clients are escaped.
fn text(value: &Value) -> Option<String> {
    value.as_str().map(|text| blockhaul_wire::printable(text.as_bytes(), 4096).to_string())
}

/// A sentence of the server, on one line; names in it are quoted already.
fn message(value: &Value) -> Option<String> {
    value.as_str().map(out::one_line)
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
    use serde_json::json;

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
        let answer = json!({ "clients": [{
            "number": 1, "address": "a local client", "export": "\u{1b}[2J", "tls": null,
            "in_flight": 0, "requests": { "read": 2 }, "bytes": { "read": 4096, "write": 0 },
            "age": 1.0, "leaving": false,
        }] });
        let text = clients(&answer);
        assert!(!text.contains('\u{1b}'), "{text}");
        assert!(text.contains("4.0K"), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}
