//! `--page` and `--metrics`: the snapshots of copies and servers, files for node_exporter, the alert
//! rules and the dashboard in `examples`, and the page in a browser.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use blockhaul_testkit::tools::{self, ScratchDir, SkipReason, text};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);
const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");

/// A program with a page on a Unix socket; killed when it is dropped.
struct Watched {
    child: Child,
    socket: PathBuf,
}

impl Watched {
    fn start(scratch: &ScratchDir, args: &[&str]) -> Watched {
        let socket = scratch.socket("page");
        let child = Command::new(OURS)
            .args(args)
            .arg(format!("--metrics=unix:{}", socket.display()))
            .arg("--page")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Watched { child, socket }
    }

    /// A connection after this request.
    fn ask(&self, path: &str) -> UnixStream {
        let mut peer = tools::until_ok("it listens", || UnixStream::connect(&self.socket));
        peer.set_read_timeout(Some(LIMIT)).unwrap();
        peer.write_all(format!("GET {path} HTTP/1.1\r\nHost: a.proxy\r\n\r\n").as_bytes()).unwrap();
        peer
    }

    fn get(&self, path: &str) -> String {
        let mut answer = String::new();
        self.ask(path).read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{path}: {head}");
        body.to_string()
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.get("/status.json")).unwrap()
    }

    /// A snapshot for which `check` is true.
    fn status_with(&self, check: impl Fn(&Value) -> bool) -> Value {
        tools::until_ok("such a snapshot", || {
            let status = self.status();
            if check(&status) { Ok(status) } else { Err(status) }
        })
    }

    fn stop(mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        tools::wait_within(&mut self.child, LIMIT).unwrap().code()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The snapshots of all events, and whether the last one is the end.
fn events(peer: UnixStream) -> (Vec<Value>, bool) {
    let mut snapshots = Vec::new();
    let mut ended = false;
    let mut lines = BufReader::new(peer).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("HTTP/1.1 200 "));
    for line in lines {
        let line = line.unwrap();
        if let Some(data) = line.strip_prefix("data: ") {
            snapshots.push(serde_json::from_str(data).unwrap());
        }
        ended |= line == "event: end";
    }
    (snapshots, ended)
}

/// The sum of the digits of a map's strings, cell by cell.
fn filled(map: &Value, kinds: &[&str]) -> Vec<u32> {
    let digits = |kind: &str| -> Vec<u32> {
        map[kind].as_str().unwrap().chars().map(|digit| digit.to_digit(10).unwrap()).collect()
    };
    let each: Vec<_> = kinds.iter().map(|kind| digits(kind)).collect();
    (0..each[0].len()).map(|cell| each.iter().map(|kind| kind[cell]).sum()).collect()
}

#[test]
fn the_last_event_is_the_last_line_of_progress() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("disk.raw");
    let args = ["copy", "--progress=json:1", "--verify", "--rate", "16M", "--request-size", "64k"];
    let ends = ["sample:24M", target.to_str().unwrap()];
    let mut copy = Watched::start(&scratch, &[&args[..], &ends].concat());
    let running = copy.status_with(|status| status["done"].as_u64() > Some(4 << 20));
    assert_eq!((&running["command"], &running["finished"]), (&"copy".into(), &false.into()));
    assert_eq!((&running["source"], &running["target"]), (&ends[0].into(), &ends[1].into()));
    let cells = filled(&running["map"], &["data", "zero"]);
    assert!(cells.len() == 512 && cells[0] >= 9, "it fills from the start: {cells:?}");
    assert!(cells[511] == 0, "the end is not done: {cells:?}");
    let (snapshots, ended) = events(copy.ask("/events"));
    let mut printed = String::new();
    copy.child.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    assert!(copy.child.wait().unwrap().success());
    let last: Value = serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    let event = snapshots.last().unwrap();
    assert!(ended && *event == last, "{event}\n{last}");
    assert_eq!((&last["success"], &last["verified"]), (&true.into(), &(24 << 20).into()));
    let cells = filled(&last["map"], &["data", "zero"]);
    assert!(cells.iter().all(|cell| *cell >= 9), "{cells:?}");
    assert!(filled(&last["map"], &["verified"]).iter().all(|cell| *cell == 9), "{last}");
    let known: u64 =
        ["data", "zeroed", "skipped"].iter().map(|kind| last[kind].as_u64().unwrap()).sum();
    assert_eq!(known, 24 << 20);
    for side in ["source", "target"] {
        let classes = last["latency"][side]["classes"].as_array().unwrap();
        assert_eq!(classes.len(), last["latency"]["bounds"].as_array().unwrap().len() + 1);
        assert!(classes.iter().filter_map(Value::as_u64).sum::<u64>() > 100, "{last}");
    }
    let times: Vec<_> = snapshots.iter().map(|each| each["elapsed"].as_f64().unwrap()).collect();
    assert!(times.is_sorted() && times.len() >= 2, "{times:?}");
}

#[test]
fn maps_show_what_is_copied_and_what_not() {
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("disk.raw");
    std::fs::write(&target, vec![7; 8 << 20]).unwrap();
    let args = ["copy", "--progress=json:1", "--range", "2M:2M", "pattern:8M"];
    let mut copy = Watched::start(&scratch, &[&args[..], &[target.to_str().unwrap()]].concat());
    let mut printed = String::new();
    copy.child.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    assert!(copy.child.wait().unwrap().success(), "{printed}");
    let last: Value = serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    let cells = filled(&last["map"], &["data", "zero", "resumed"]);
    let wanted: Vec<_> =
        (0..512).map(|cell| if (128..256).contains(&cell) { 9 } else { 0 }).collect();
    assert_eq!(cells, wanted, "{last}");
}

#[test]
fn parameters_that_may_be_secret_are_not_shown() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let shown = format!("nbd+unix:///?socket={}", socket.display());
    let source = format!("{shown}&tls-psk-file=/keys");
    let args = ["copy", "--rate", "1M", &source, "[", OURS, "serve", "memory:64M", "]"];
    let server = tools::PeerServer::blockhaul(OURS.as_ref(), &socket, &["pattern:64M"]).unwrap();
    let copy = Watched::start(&scratch, &args);
    let status = copy.status();
    // A socket is where the server is.
    assert_eq!(status["source"], shown);
    assert_eq!(status["target"], format!("[ {OURS} … ]"));
    assert_ne!(copy.stop(), Some(0));
    server.stop().unwrap();
}

#[test]
fn jobs_list_their_disks() {
    let scratch = ScratchDir::new().unwrap();
    let job = scratch.file("job.toml");
    let mut toml = "parallel = 1\npage = true\n".to_string();
    for (name, layer) in [("a", ""), ("b", "source-layer = \"error\"\n"), ("c", "")] {
        let target = scratch.file(name);
        toml += &format!("[[disk]]\nname = \"{name}\"\nretries = 0\nsource = \"pattern:3M\"\n");
        toml += &format!("{layer}target = \"{}\"\n", target.display());
    }
    std::fs::write(&job, toml).unwrap();
    let socket = scratch.socket("m");
    let output = run(&[
        "copy",
        "--progress=json:1",
        &format!("--metrics=unix:{}", socket.display()),
        "--job",
        job.to_str().unwrap(),
    ]);
    assert!(!output.status.success());
    let last: Value = serde_json::from_str(text(&output.stdout).lines().last().unwrap()).unwrap();
    let states: Vec<_> = last["disks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|disk| disk["state"].as_str().unwrap())
        .collect();
    assert_eq!(states, ["complete", "failed", "complete"], "{last}");
    let failed = &last["disks"][1];
    assert!(failed["error"].as_str().unwrap().contains("pattern:3M"), "{failed}");
    assert!(filled(&last["disks"][2]["map"], &["data"]).iter().all(|cell| *cell == 9), "{last}");
    assert!(last["map"].is_null(), "{last}");
}

#[test]
fn servers_list_their_clients() {
    let scratch = ScratchDir::new().unwrap();
    let socket = scratch.socket("s");
    let control = scratch.socket("c");
    let args = ["serve", "-U", socket.to_str().unwrap(), "--control", control.to_str().unwrap()];
    let device = ["--layer", "delay?write=1ms", "--export", "x=memory:64M"];
    let server = Watched::start(&scratch, &[&args[..], &device].concat());
    let idle = server.status_with(|status| !status["exports"].is_null());
    assert_eq!((&idle["connections"], &idle["finished"]), (&0.into(), &false.into()), "{idle}");
    let uri = format!("nbd+unix:///x?socket={}", socket.display());
    let mut client = Command::new(OURS)
        .args(["copy", "-C1", "--rate", "1M", "pattern:64M", &uri])
        .spawn()
        .unwrap();
    let busy = server.status_with(|status| status["bytes"]["write"].as_u64() > Some(1 << 20));
    let shown = busy["clients"].as_array().unwrap();
    let writer = shown.iter().find(|client| client["bytes"]["write"].as_u64() > Some(0)).unwrap();
    assert_eq!(
        (&writer["export"], shown.len() as u64),
        (&"x".into(), busy["connections"].as_u64().unwrap())
    );
    let listed = run(&["ctl", control.to_str().unwrap(), "clients", "--json"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert!(listed.to_string().contains(&format!("\"number\":{}", writer["number"])), "{listed}");
    assert_eq!(
        (&busy["exports"][0]["name"], &busy["exports"][0]["size"]),
        (&"x".into(), &(64 << 20).into())
    );
    assert_eq!(busy["exports"][0]["layers"], json!(["delay"]), "without parameters");
    let viewer = server.ask("/events");
    client.kill().unwrap();
    client.wait().unwrap();
    assert_eq!(server.stop(), Some(0));
    let (snapshots, ended) = events(viewer);
    let last = snapshots.last().unwrap();
    assert!(ended && last["finished"] == true, "{last}");
    assert!(last["bytes"]["write"].as_u64() >= busy["bytes"]["write"].as_u64(), "{last}");
}

#[test]
fn jobs_are_in_snapshots_metrics_and_tables() {
    let scratch = ScratchDir::new().unwrap();
    let (socket, control) = (scratch.socket("s"), scratch.socket("c"));
    let args = ["serve", "-U", socket.to_str().unwrap(), "--control", control.to_str().unwrap()];
    let exports = ["--export", "x=memory:8M", "--export", "y=memory:8M"];
    let server = Watched::start(&scratch, &[&args[..], &exports].concat());
    assert_eq!(server.status_with(|status| !status["jobs"].is_null())["jobs"], json!([]));
    let ctl = |args: &[&str]| run(&[&["ctl", control.to_str().unwrap()], args].concat());
    let target = ["backup", "x", "nbd+unix:///?socket=/nosuch&tls-psk-file=/keys", "--wait"];
    let failed = ctl(&target);
    assert_eq!(failed.status.code(), Some(3), "{}", text(&failed.stderr));
    let slow = ["backup", "y", "memory:8M", "--rate", "2M", "--request-size", "64k"];
    let uri = format!("nbd+unix:///y?socket={}", socket.display());
    assert!(run(&["copy", "pattern:8M", &uri]).status.success());
    assert!(ctl(&slow).status.success());
    let moving = |status: &Value| status["jobs"][1]["data_rate"].as_u64() > Some(0);
    let status = server.status_with(moving);
    let [first, second] = &status["jobs"].as_array().unwrap()[..] else { panic!("{status}") };
    assert_eq!((&first["state"], &first["exit_status"]), (&"failed".into(), &3.into()));
    assert!(first["end_time"].as_f64() > Some(1e9), "{first}");
    assert_eq!(first["target"], "nbd+unix:///?socket=/nosuch", "without parameters");
    assert_eq!((&second["state"], &second["total"]), (&"running".into(), &(8 << 20).into()));
    assert_eq!(
        (&status["tls"], &status["exports"][0]["bytes"]["read"]),
        (&"without TLS".into(), &0.into())
    );
    let metrics = server.get("/metrics");
    for line in [
        "blockhaul_serve_job_state{job_id=\"1\",type=\"backup\",export=\"x\",state=\"failed\"} 1",
        "blockhaul_serve_job_exit_status{job_id=\"1\",type=\"backup\",export=\"x\"} 3",
        "blockhaul_serve_job_state{job_id=\"2\",type=\"backup\",export=\"y\",state=\"running\"} 1",
        "blockhaul_serve_job_total_bytes{job_id=\"2\",type=\"backup\",export=\"y\"} 8388608",
    ] {
        assert!(metrics.lines().any(|each| each == line), "{line}: {metrics}");
    }
    // The state is a word; the error has a line of its own.
    let table = ctl(&["jobs"]);
    let lines: Vec<_> = text(&table.stdout).lines().map(str::to_string).collect();
    assert!(lines[1].contains("failed (3)") && !lines[1].contains("cannot open"), "{lines:?}");
    assert!(lines[3].starts_with("job 1: cannot open the target: "), "{lines:?}");
    server.stop();
}

#[test]
fn a_backup_ends_with_one_sentence() {
    let scratch = ScratchDir::new().unwrap();
    let (socket, control) = (scratch.socket("s"), scratch.socket("c"));
    let args = ["serve", "-U", socket.to_str().unwrap(), "--control", control.to_str().unwrap()];
    let server = Watched::start(&scratch, &[&args[..], &["--export", "x=memory:8M"]].concat());
    server.status_with(|status| !status["jobs"].is_null());
    let ctl = |args: &[&str]| {
        let output = run(&[&["ctl", control.to_str().unwrap()], args].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).to_string()
    };
    let target = scratch.file("x.raw");
    let target = target.to_str().unwrap();
    let full = ctl(&["backup", "x", target, "--start-bitmap", "m", "--verify", "--wait"]);
    assert!(full.starts_with("backed up 8 MiB in ") && full.ends_with(" s, verified\n"), "{full}");
    let uri = format!("nbd+unix:///x?socket={}", socket.display());
    assert!(run(&["copy", "--range", "1M:64k", "pattern:8M", &uri]).status.success());
    let part = ctl(&["backup", "x", target, "--bitmap", "m", "--wait", "-v"]);
    let mut lines = part.lines();
    assert!(lines.next().unwrap().starts_with("backed up 64 KiB of 8 MiB in "), "{part}");
    assert!(lines.next().unwrap().starts_with("65536 bytes: 65536 data"), "{part}");
    assert!(!part.contains("discarded"), "what is saved is no data of the user: {part}");
    server.stop();
}

fn run(args: &[&str]) -> Output {
    tools::output(Command::new(OURS).args(args), LIMIT).unwrap()
}

#[test]
fn a_file_for_the_collector_tells_how_a_copy_ended() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.file("night.prom");
    let wanted = format!("--metrics=textfile:{}", file.display());
    assert!(run(&["copy", &wanted, "pattern:3M", "null:"]).status.success());
    let good = std::fs::read_to_string(&file).unwrap();
    for line in [
        "blockhaul_copy_finished{run=\"night\"} 1",
        "blockhaul_copy_exit_status{run=\"night\"} 0",
        "blockhaul_copy_bytes_total{run=\"night\",kind=\"data\"} 3145728",
    ] {
        assert!(good.lines().any(|each| each == line), "{line}: {good}");
    }
    let failed =
        run(&["copy", &wanted, "--source-layer", "error", "--retries=0", "pattern:3M", "null:"]);
    let status = failed.status.code().unwrap();
    let bad = std::fs::read_to_string(&file).unwrap();
    assert!(
        status != 0 && bad.contains(&format!("_exit_status{{run=\"night\"}} {status}\n")),
        "{bad}"
    );
    for args in
        [&["--page"][..], &["--page", &wanted], &["--metrics=textfile:/x"], &[&wanted, &wanted]]
    {
        let output = run(&[&["copy"], args, &["null:1M", "null:"]].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stderr));
    }
    let nowhere = run(&["copy", "--metrics=textfile:/nowhere/x.prom", "null:1M", "null:"]);
    assert_eq!(nowhere.status.code(), Some(1), "{}", text(&nowhere.stderr));
}

/// Metrics of a copy, of a pull and of a server, in which everything has happened once.
fn all_metrics(scratch: &ScratchDir) -> [String; 3] {
    let file = scratch.file("copy.prom");
    let socket = scratch.socket("s");
    let control = scratch.socket("c");
    let sockets = ["-U", socket.to_str().unwrap(), "--control", control.to_str().unwrap()];
    let server = Watched::start(scratch, &[&["serve"], &sockets[..], &["memory:3M"]].concat());
    server.status_with(|status| !status["exports"].is_null());
    let backup = ["backup", "", "memory:3M", "--wait"];
    assert!(run(&[&["ctl", control.to_str().unwrap()], &backup[..]].concat()).status.success());
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let wanted = format!("--metrics=textfile:{}", file.display());
    assert!(run(&["copy", &wanted, "pattern:3M", &uri]).status.success());
    let job = scratch.file("job.toml");
    let store = scratch.file("store").display().to_string();
    std::fs::write(&job, format!("[[disk]]\nsource = \"{uri}\"\nstore = \"{store}\"\n")).unwrap();
    let pulled = scratch.file("pull.prom");
    let wanted = format!("--metrics=textfile:{}", pulled.display());
    assert!(run(&["pull", job.to_str().unwrap(), &wanted]).status.success());
    let [copied, pulled] = [file, pulled].map(|file| std::fs::read_to_string(file).unwrap());
    [copied, pulled, server.get("/metrics")]
}

/// Names of metrics in a text that begins with them, or mentions them.
fn names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("blockhaul_")).collect()
}

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../examples")
}

/// The queries of the dashboards, with values for their variables.
fn queries() -> Vec<String> {
    let of_file = |name: &str| {
        let path = examples().join("grafana").join(name);
        let dashboard: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let panels = dashboard["panels"].as_array().unwrap().clone();
        let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
        let queries = targets.map(|target| target["expr"].as_str().unwrap().to_string());
        queries.collect::<Vec<_>>()
    };
    let all = ["blockhaul.json", "blockhaul-backups.json"].into_iter().flat_map(of_file);
    all.map(|query| query.replace("$__rate_interval", "5m").replace("$instance", ".*")).collect()
}

#[test]
fn rules_and_dashboard_use_metrics_that_exist() {
    let scratch = ScratchDir::new().unwrap();
    let metrics = all_metrics(&scratch).concat();
    let known = names(&metrics);
    let rules = std::fs::read_to_string(examples().join("prometheus/alerts.yml")).unwrap();
    let queries = queries().join("\n");
    assert!(queries.lines().count() > 15, "{queries}");
    let missing: Vec<_> = names(&queries)
        .into_iter()
        .chain(names(&rules))
        .filter(|name| !known.contains(name))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(known.contains("blockhaul_build_info"), "{known:?}");
}

#[test]
fn promtool_accepts_metrics_rules_and_queries() {
    let probe = Command::new("promtool")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !probe.is_ok_and(|status| status.success()) {
        return tools::skip("promtool is not installed (Debian: prometheus)");
    }
    let promtool = |args: &[&str], input: &str| {
        let mut child = Command::new("promtool")
            .args(args)
            .current_dir(examples().join("prometheus"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "promtool {args:?}: {said}");
    };
    let scratch = ScratchDir::new().unwrap();
    for metrics in all_metrics(&scratch) {
        // It also checks names and units, as `_total` and `_seconds`.
        promtool(&["check", "metrics"], &metrics);
    }
    promtool(&["check", "rules", "alerts.yml"], "");
    promtool(&["test", "rules", "alerts-test.yml"], "");
    // A dashboard's queries are checked as rules.
    let rule =
        |query: &String| format!("  - {{record: a, expr: {}}}\n", Value::from(query.as_str()));
    let rules: String = queries().iter().map(rule).collect();
    let file = scratch.file("queries.yml");
    std::fs::write(&file, format!("groups:\n- name: dashboard\n  rules:\n{rules}")).unwrap();
    promtool(&["check", "rules", "--lint=none", file.to_str().unwrap()], "");
}

#[test]
fn the_page_works_in_a_browser() {
    if !tools::runs_long() {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/page/browser.py");
    let mut command = Command::new("python3");
    let output = tools::output(command.arg(script).arg(OURS), 5 * LIMIT).unwrap();
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    match output.status.code() {
        Some(77) => tools::skip_or_fail(&SkipReason::new(said)),
        status => assert_eq!(status, Some(0), "{said}"),
    }
}
