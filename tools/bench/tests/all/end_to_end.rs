//! Whole scenarios with small commands: what is reported is what happened.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhaul_bench::args::{ScenarioArgs, ScenarioOptions};
use blockhaul_bench::result::{CellState, Metric, ScenarioReport};
use blockhaul_bench::scenario::Scenario;
use blockhaul_bench::{html, save, table};
use blockhaul_testkit::tools::until;
use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: ScenarioArgs,
}

fn options(dir: &Path, more: &[&str]) -> ScenarioOptions {
    let place = dir.display().to_string();
    let mut words = vec!["bench", "x.toml", "--quiet", "--scratch", &place, "--disk", &place];
    words.extend(more);
    Cli::try_parse_from(words).unwrap().args.options
}

fn run(text: &str, more: &[&str]) -> ScenarioReport {
    let dir = tempfile::tempdir().unwrap();
    let scenario = Scenario::parse("x", text).unwrap();
    let stop = AtomicBool::new(false);
    let report =
        blockhaul_bench::run_scenario("x", &scenario, &options(dir.path(), more), &stop).unwrap();
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert!(left.is_empty(), "scratch is left: {left:?}");
    report.unwrap()
}

/// A copier that is right, one that writes a wrong byte, one that does nothing, one that is absent.
const COPIERS: &str = r#"
title = "Copiers"
runs = 3
warmup = 1
prepare = [{ fresh = "{scratch}/target", size = "{size}" }]
check = [{ compare = ["{scratch}/source", "{scratch}/target"] }]
variables = { size = "512k" }

[[image]]
path = "{scratch}/source"
size = "{size}"
data = "128k"
run = "64k"

[[environment]]
label = "good"
command = ["cp", "{scratch}/source", "{scratch}/target"]

[[environment]]
label = "corrupting"
command = "cp {scratch}/source {scratch}/target; printf x | dd of={scratch}/target bs=1 seek=300000 conv=notrunc status=none"

[[environment]]
label = "idle"
command = ["true"]

[[environment]]
label = "absent"
command = ["no-such-copier", "{scratch}/source"]

[[case]]
label = "fresh"

[[case]]
label = "kept"
prepare = [{ overwrite = "{scratch}/target", like = "{scratch}/source" }]
"#;

#[test]
fn a_corrupting_copier_has_failed_and_is_not_fast() {
    let report = run(COPIERS, &["--runs", "2"]);
    assert!(report.is_whole());
    for row in 0..2 {
        let [good, corrupting, idle, absent] = report.row(row) else { panic!() };
        assert!(matches!(good.state(Metric::Wall), CellState::Good(s) if s.count == 2));
        assert_eq!(good.ratio.unwrap().median, 1.0);
        for wrong in [corrupting, idle] {
            assert_eq!(wrong.state(Metric::Wall), CellState::Failed(2), "row {row}");
            assert_eq!((wrong.wall_s, wrong.ratio), (None, None));
        }
        let reason = "the program no-such-copier is not there";
        assert_eq!(absent.state(Metric::Wall), CellState::Skipped(reason));
    }
    let run = report.runs.iter().find(|run| run.column == 1).unwrap();
    let failure = run.failure.as_ref().unwrap();
    assert_eq!(failure.stage, "check");
    assert!(failure.why.contains("byte 300000 is 0x78"), "{}", failure.why);
    for text in [table::text(&report), table::markdown(&report), html::page(&report)] {
        assert!(text.contains("FAILED") && text.contains("skipped"));
        assert!(text.contains("good") && text.contains("kept"));
    }
    let text = save::json(&report).unwrap();
    assert!(text.contains("cp {scratch}/source {scratch}/target"), "{text}");
    assert!(!text.contains("blockhaul-bench-"), "a folder of this machine is told");
}

#[test]
fn rounds_are_in_random_order_that_repeats_with_the_seed() {
    let order = |seed| {
        let report = run(COPIERS, &["--seed", seed, "--column", "good", "--warmup", "0"]);
        report.runs.iter().map(|run| (run.round, run.row)).collect::<Vec<_>>()
    };
    let text = COPIERS.replace(r#"label = "kept""#, r#"label = "kept {n}""#);
    let text = format!("matrix = {{ n = [1, 2, 3, 4] }}\n{text}").replace("fresh\"", "fresh {n}\"");
    let order_of_many = |seed| {
        let more = ["--seed", seed, "--column", "good", "--runs", "2", "--warmup", "0"];
        let report = run(&text, &more);
        report.runs.iter().map(|run| (run.round, run.row)).collect::<Vec<_>>()
    };
    let one = order("1");
    assert_eq!(one.iter().map(|run| run.0).collect::<Vec<_>>(), [0, 0, 1, 1, 2, 2]);
    assert_eq!(one, order("1"));
    let first = order_of_many("1");
    assert_eq!(first, order_of_many("1"));
    assert_ne!(first, order_of_many("2"));
    assert_ne!(
        first[..8].iter().map(|run| run.1).collect::<Vec<_>>(),
        first[8..].iter().map(|run| run.1).collect::<Vec<_>>()
    );
}

#[test]
fn ctrl_c_keeps_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("mark");
    let text = COPIERS.replace("runs = 3", "runs = 1000").replace(
        r#"command = ["cp", "{scratch}/source", "{scratch}/target"]"#,
        &format!(
            "command = \"cp {{scratch}}/source {{scratch}}/target; echo >>{}\"",
            mark.display()
        ),
    );
    let scenario = Scenario::parse("x", &text).unwrap();
    let stop = AtomicBool::new(false);
    let options = options(dir.path(), &["--column", "good", "--warmup", "0"]);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            until("some runs have ended", || {
                std::fs::read(&mark).is_ok_and(|lines| lines.len() >= 5)
            });
            stop.store(true, Ordering::Relaxed);
        });
        blockhaul_bench::run_scenario("x", &scenario, &options, &stop).unwrap().unwrap()
    });
    assert!(report.interrupted && !report.runs.is_empty());
    assert!(report.runs.len() < 2000 && report.failures() == 0);
    assert!(table::text(&report).contains("STOPPED"));
}

#[test]
fn servers_run_around_the_command_and_are_counted() {
    let report = run(
        r#"
        title = "Server"
        runs = 1
        warmup = 0
        prepare = [{ remove = "{scratch}/done" }, { remove = "{scratch}/dead" }]
        [server.busy]
        command = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); [ $i = 10 ] && touch {scratch}/ready; done; touch {scratch}/done; sleep 60"
        exists = "{scratch}/ready"
        [server.dead]
        command = "echo $$ >{scratch}/dead; exit 5"
        exists = "{scratch}/dead"
        [[environment]]
        label = "wait"
        # A server that ends has ended before this does: it is a zombie then, or nothing at all.
        command = """
        until [ -e {scratch}/done ]; do sleep 0.01; done
        [ ! -e {scratch}/dead ] && exit
        until [ -s {scratch}/dead ]; do sleep 0.01; done
        dead=$(cat {scratch}/dead)
        while grep -q '^State:[[:space:]]*[^Z[:space:]]' /proc/$dead/status 2>/dev/null; do sleep 0.01; done
        """
        [[case]]
        label = "alive"
        servers = ["busy"]
        check = [["test", "-e", "{scratch}/done"]]
        [[case]]
        label = "dead"
        servers = ["dead", "busy"]
        unchecked = "it cannot go well"
        "#,
        &[],
    );
    let alive = report.runs.iter().find(|run| run.row == 0).unwrap();
    assert_eq!(alive.failure, None);
    assert_eq!(alive.servers[0].0, "busy");
    assert!(alive.servers[0].1.cpu_s() > 0.0, "{alive:?}");
    assert!(alive.total_cpu_s() > alive.command.cpu_s());
    let dead = report.runs.iter().find(|run| run.row == 1).unwrap().failure.as_ref().unwrap();
    assert_eq!(dead.stage, "servers");
    assert!(dead.why.starts_with("server dead: ended with exit status 5"), "{}", dead.why);
}

#[test]
fn a_cell_that_only_fails_is_given_up() {
    let report = run(COPIERS, &["--column", "idle", "--row", "fresh", "--runs", "50"]);
    assert_eq!(report.runs.len(), 3);
    let text = table::text(&report);
    assert!(text.contains("It was not repeated."), "{text}");
    assert!(text.contains("FAILED"), "{text}");
}
