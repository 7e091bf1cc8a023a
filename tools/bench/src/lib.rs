//! `blockhaul bench`, as a library: benchmarks as data, honestly. The program is blockhaul-bench; `bench device` and
//! `bench load` are part of blockhaul (crate `measure`).
//!
//! A scenario file says what is measured: environments are the columns of a table, a command each,
//! ours or anybody's; cases are its rows. Every cell is run many times, in random order round by
//! round, so that what drifts on the machine disturbs all columns alike. Every run is prepared,
//! timed, and its result checked: a fast wrong run has failed. Results are tables for terminals
//! and Markdown, raw data, and a page with charts.
//!
//! - `scenario`, `step`, `vars`: the file format. `plan`: what it comes to on this machine.
//! - `run`: the rounds. `process`, `usage`: one command measured. `calls`: its system
//!   calls. `files`: images and comparison. `folder`: where runs take place.
//! - `mount`: file systems for the runs.
//! - `stats`, `metric`, `result`: from runs to summaries. `cells`, `notes`: their text. `table`, `html`
//!   (with `markup`), `curve`, `save`, `compare`: for people.
//! - `docs`: figures for the README and docs/performance.md. `helper`: small programs that scenarios
//!   need. `args`, `manual`: the command line and what its help says.

#![forbid(unsafe_code)]

pub mod args;
pub mod calls;
mod cells;
pub mod compare;
pub mod curve;
pub mod docs;
pub mod files;
mod folder;
mod group;
pub mod helper;
pub mod html;
pub mod machine;
mod manual;
mod markup;
pub mod metric;
pub mod mount;
mod notes;
pub mod plan;
pub mod process;
pub mod progress;
pub mod result;
pub mod run;
pub mod save;
pub mod scenario;
pub mod stats;
pub mod step;
pub mod table;
pub mod usage;
pub mod vars;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{SystemTime, UNIX_EPOCH};

pub use args::ScenarioArgs;
pub use blockhaul_measure::{MeasureError, Result};

use args::{BenchCommand, OutputFormat, ScenarioOptions};
use blockhaul_measure::shell_line;
use folder::ScratchFolder;
use plan::{BenchPaths, PlanStep, RunSelection, ScenarioPlan};
use process::ProcessContext;
use progress::RunProgress;
use result::ScenarioReport;
use scenario::Scenario;

/// The environment variable with the program that has started this one.
const PROGRAM: &str = "BLOCKHAUL_PROGRAM";
/// Exit status after Ctrl-C: 128 and the number of the signal.
const INTERRUPTED: u8 = 130;

/// Does what the command line says. Exit status 0 if all went well; 1 if a run failed, or a
/// comparison found something worse; 2 if the command line, a scenario or a result cannot be
/// understood; 130 if it was stopped.
pub fn main(args: ScenarioArgs) -> ExitCode {
    match act(args) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            write_all(&mut std::io::stderr(), &format!("blockhaul: bench: {error}\n"));
            ExitCode::from(error.status())
        }
    }
}

fn act(args: ScenarioArgs) -> Result<u8> {
    match args.action {
        None => {
            let scenarios = args.files.iter().map(|path| Scenario::load(path));
            run_all(scenarios.collect::<Result<_>>()?, &args.options)
        }
        Some(BenchCommand::Run { names, options }) => {
            let scenarios = names.iter().map(|name| Scenario::built_in(name));
            run_all(scenarios.collect::<Result<_>>()?, &options)
        }
        Some(BenchCommand::List) => {
            for (name, _) in scenario::BUILT_IN {
                print(&format!("{name:10} {}\n", Scenario::built_in(name)?.1.title));
            }
            Ok(0)
        }
        Some(BenchCommand::Compare { old, new, threshold }) => {
            let found = compare::compare(&old, &new, threshold)?;
            print(&found.text);
            Ok(u8::from(found.worse > 0))
        }
        Some(BenchCommand::Docs { root }) => {
            for path in docs::write(&root)? {
                print(&format!("wrote {}\n", path.display()));
            }
            Ok(0)
        }
        Some(BenchCommand::Helper { helper }) => {
            helper.run()?;
            Ok(0)
        }
        Some(BenchCommand::Render { dir }) => {
            save::render(&save::load(&dir)?, &dir)?;
            Ok(0)
        }
    }
}

/// Where results are written: no new folder is made in whatever folder is the current one.
fn results_folder(options: &ScenarioOptions, current: &Path) -> Option<PathBuf> {
    let usual = current.join("bench/results");
    options.out.clone().or_else(|| usual.is_dir().then_some(usual))
}

fn run_all(scenarios: Vec<(String, Scenario)>, options: &ScenarioOptions) -> Result<u8> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in
        [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP]
    {
        signal_hook::flag::register(signal, stop.clone())
            .map_err(|error| MeasureError::new(format!("cannot catch signals: {error}")))?;
    }
    let mut status = 0;
    for (name, scenario) in &scenarios {
        let Some(report) = run_scenario(name, scenario, options, &stop)? else { continue };
        print(&match options.format {
            OutputFormat::Text => table::text(&report),
            OutputFormat::Markdown => table::markdown(&report),
            OutputFormat::Csv => table::csv(&report),
            OutputFormat::Json => save::json(&report)?,
        });
        if !options.no_save && !report.runs.is_empty() {
            let said = match results_folder(options, Path::new("")) {
                Some(folder) => {
                    format!("results are in {}\n", save::save(&report, &folder)?.display())
                }
                None => "results are not kept: --out DIR writes them to files\n".to_owned(),
            };
            write_all(&mut std::io::stderr(), &said);
        }
        if report.interrupted {
            return Ok(INTERRUPTED);
        }
        if report.failures() > 0 {
            status = 1;
        }
    }
    Ok(status)
}

/// Runs a scenario as the options say; None if it was only to be shown. Folders of this machine are
/// hidden in the report.
pub fn run_scenario(
    name: &str,
    scenario: &Scenario,
    options: &ScenarioOptions,
    stop: &AtomicBool,
) -> Result<Option<ScenarioReport>> {
    let scratch = ScratchFolder::new(&home_of_scratch(options), "scratch", options.keep)?;
    let disk = ScratchFolder::new(&options.disk, "disk", options.keep)?;
    let logs = ScratchFolder::new(&scratch.path, "logs", false)?;
    let mut search = options.path.clone();
    search.extend(std::env::var_os("PATH").iter().flat_map(std::env::split_paths));
    let path: OsString = std::env::join_paths(&search)
        .map_err(|error| MeasureError::usage(format!("--path: {error}")))?;
    let mut places = BenchPaths {
        scratch: scratch.path.clone(),
        disk: disk.path.clone(),
        blockhaul: None,
        search,
    };
    places.blockhaul = own_program(options, &places);
    let mut plan = ScenarioPlan::new(name, scenario, &choice(options), &places, any_seed())?;
    if options.dry_run {
        print(&describe(&plan));
        return Ok(None);
    }
    let mut progress = RunProgress::new(options.quiet);
    let ground = ProcessContext { places: &places, path: &path, logs: &logs.path, stop };
    let machine =
        machine::MachineFacts::examine(options.label.as_deref(), &scratch.path, &disk.path);
    let started = result::now_utc();
    // Ends before the folders that it is in are removed.
    let _mounts = mount::MountGuard::make(&mut plan, &ground, &mut progress);
    if plan.cells.iter().any(|cell| cell.is_ok()) {
        run::set_up(&plan, &ground, &mut progress)?;
    }
    let programs = versions(&plan, &ground);
    let outcome = run::run(&plan, &ground, &mut progress);
    progress.end();
    let here = std::env::current_dir().unwrap_or_default();
    let settings = settings(&plan);
    let machine_cores = machine.cores;
    let report = ScenarioReport {
        format: result::FORMAT,
        name: plan.name.clone(),
        title: plan.title.clone(),
        description: plan.description.clone(),
        full: plan.full,
        one_size: plan.one_size,
        interrupted: outcome.interrupted,
        started,
        machine,
        load_after: machine::load(),
        commit: options.commit.clone().or_else(|| machine::git_commit(&here)),
        programs,
        noise_percent: result::noise_percent(&settings, machine_cores, &outcome.runs),
        settings,
        columns: plan.columns.clone(),
        reference: plan.reference,
        curve: plan.curve.clone(),
        show: plan.show.clone(),
        rate_unit: plan.rate_unit.clone(),
        rows: plan.rows.iter().map(heading).collect(),
        setup: setup_lines(&plan),
        cells: result::summarize(&plan, &outcome.runs),
        runs: outcome.runs,
    };
    secrets(&places, options, &here).hide_in(&report).map(Some)
}

/// The directory in which the folder for disks in memory is made.
fn home_of_scratch(options: &ScenarioOptions) -> PathBuf {
    match &options.scratch {
        Some(dir) => dir.clone(),
        None if Path::new("/dev/shm").is_dir() => PathBuf::from("/dev/shm"),
        None => std::env::temp_dir(),
    }
}

/// What of a scenario the options choose.
fn choice(options: &ScenarioOptions) -> RunSelection {
    RunSelection {
        full: options.full,
        runs: options.runs,
        warmup: options.warmup,
        seed: options.seed,
        set: options.variables(),
        rows: options.row.clone(),
        columns: options.column.clone(),
        drop_caches: options.drop_caches,
    }
}

/// How a plan is measured, for the report.
fn settings(plan: &ScenarioPlan) -> result::RunSettings {
    result::RunSettings {
        runs: plan.runs,
        warmup: plan.warmup,
        together: plan.together,
        timeout_s: plan.timeout.as_secs_f64(),
        drop_caches: plan.drop_caches,
        seed: plan.seed,
    }
}

/// The program that `{blockhaul}` stands for.
fn own_program(options: &ScenarioOptions, places: &BenchPaths) -> Option<PathBuf> {
    match &options.blockhaul {
        Some(given) => std::path::absolute(given).ok(),
        None => std::env::var_os(PROGRAM)
            .map(PathBuf::from)
            .or_else(beside)
            .or_else(|| places.find("blockhaul")),
    }
}

/// The blockhaul that lies beside this program.
fn beside() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name("blockhaul");
    path.is_file().then_some(path)
}

fn secrets(places: &BenchPaths, options: &ScenarioOptions, here: &Path) -> save::PathReplacements {
    let mut secrets = save::PathReplacements::default();
    secrets.add(&places.scratch, "{scratch}");
    secrets.add(&places.disk, "{disk}");
    secrets.add(here, "{root}");
    for dir in &options.path {
        secrets.add(dir, "{path}");
    }
    if let Some(program) = &places.blockhaul {
        secrets.add(program, "blockhaul");
    }
    if let Some(home) = std::env::var_os("HOME") {
        secrets.add(Path::new(&home), "~");
    }
    secrets
}

fn heading(row: &plan::PlanRow) -> result::ReportRow {
    result::ReportRow {
        label: row.label.clone(),
        variables: row.variables.clone(),
        unchecked: row.unchecked.clone(),
        curve_at: row.curve_at,
        amount: row.amount,
    }
}

fn setup_lines(plan: &ScenarioPlan) -> Vec<String> {
    let images = plan.images.iter().map(|image| {
        format!(
            "(image {}: {} bytes, {} of them random in runs of {}, seed {})",
            image.path.display(),
            image.size,
            image.data,
            image.run,
            image.seed
        )
    });
    let mounts = plan.mounts.iter().map(|mount| {
        let folder = mount.folder.display();
        let size = mount.size;
        format!("({} of {size} bytes on {folder}, over a loop device)", mount.kind)
    });
    mounts.chain(images).chain(plan.setup.iter().map(PlanStep::to_string)).collect()
}

/// Versions of all programs of a plan, by name.
fn versions(plan: &ScenarioPlan, ground: &ProcessContext<'_>) -> BTreeMap<String, String> {
    let mut programs = BTreeSet::new();
    for body in plan.cells.iter().flatten() {
        programs.extend(body.commands().map(|words| words[0].clone()));
    }
    programs.remove("/bin/sh");
    programs
        .into_iter()
        .filter_map(|program| {
            Some((plan::base_name(&program).to_owned(), ground.version(&program)?))
        })
        .collect()
}

/// What would be run.
fn describe(plan: &ScenarioPlan) -> String {
    let mut text = format!("{}: {} runs, {} for warming up\n", plan.title, plan.runs, plan.warmup);
    for line in setup_lines(plan) {
        text.push_str(&format!("  setup: {line}\n"));
    }
    for (row, heading) in plan.rows.iter().enumerate() {
        for (column, label) in plan.columns.iter().enumerate() {
            text.push_str(&format!("{}: {label}\n", heading.label));
            match plan.cell(row, column) {
                Err(reason) => text.push_str(&format!("  skipped: {reason}\n")),
                Ok(body) => {
                    let mut put = |what: &str, line: &str| {
                        text.push_str(&format!("  {what:8} {line}\n"));
                    };
                    body.prepare.iter().for_each(|act| put("before:", &act.to_string()));
                    body.servers.iter().for_each(|s| put("server:", &shell_line(&s.command)));
                    put("timed:", &shell_line(&body.command));
                    body.check.iter().for_each(|act| put("after:", &act.to_string()));
                }
            }
        }
    }
    text
}

/// A seed for those who did not choose one: the time.
fn any_seed() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // Small enough for every reader of JSON, which may take numbers for floating-point ones.
    since.as_micros() as u64 & ((1 << 48) - 1)
}

fn print(text: &str) {
    write_all(&mut std::io::stdout(), text);
}

/// A reader that has gone away wants no more.
fn write_all(to: &mut dyn std::io::Write, text: &str) {
    to.write_all(text.as_bytes()).and_then(|()| to.flush()).ok();
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: ScenarioArgs,
    }

    #[test]
    fn results_are_kept_only_where_there_is_a_place_for_them() {
        let dir = tempfile::tempdir().unwrap();
        let options = |words: &[&str]| {
            Cli::parse_from([&["bench", "x.toml"][..], words].concat()).args.options
        };
        assert_eq!(results_folder(&options(&[]), dir.path()), None);
        let out = results_folder(&options(&["--out", "here"]), dir.path());
        assert_eq!(out, Some("here".into()));
        let usual = dir.path().join("bench/results");
        std::fs::create_dir_all(&usual).unwrap();
        assert_eq!(results_folder(&options(&[]), dir.path()), Some(usual));
    }
}
