//! Test programs that cargo has built: what they are, and how several run at a time.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Read as _, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::{run, simulate};

/// Number of programs that run at a time. The last tests of a program are often few and slow: meanwhile another
/// program has the processors.
pub const AT_A_TIME: usize = 2;
/// Gives its process the policy SCHED_IDLE, or else the lowest priority, and becomes the program.
const IDLE: &str = "chrt --idle --pid 0 $$ 2>&- || renice -n 19 $$ >&- 2>&-; exec \"$@\"";
/// Interval between two looks at the programs that run.
const INTERVAL: Duration = Duration::from_millis(20);

/// A program with tests.
pub struct TestProgram {
    /// Source file, relative to its package.
    source: PathBuf,
    executable: PathBuf,
    /// The directory of its package.
    package: PathBuf,
    /// Uses processors only while no other process needs them.
    is_idle: bool,
}

impl TestProgram {
    /// Whether it belongs to the package in `directory`, relative to the workspace.
    pub fn is_in(&self, directory: &str) -> bool {
        self.package == run::workspace().join(directory)
    }

    /// Lets it use processors only while no other process needs them.
    pub fn idle(self) -> TestProgram {
        TestProgram { is_idle: true, ..self }
    }

    /// The command that runs it.
    fn command(&self) -> Command {
        let mut command = if self.is_idle {
            let mut shell = Command::new("sh");
            shell.args(["-c", IDLE, "sh"]).arg(&self.executable);
            shell
        } else {
            Command::new(&self.executable)
        };
        command.current_dir(&self.package).env("CARGO_MANIFEST_DIR", &self.package);
        // A cargo that a test runs compiles as a user's does.
        command.env_remove("RUSTC_WORKSPACE_WRAPPER");
        command
    }
}

/// Builds the tests of the whole workspace; the largest program is first.
pub fn build() -> Result<Vec<TestProgram>, String> {
    let mut cargo = run::cargo("test");
    cargo.args(["--no-run", "--workspace", simulate::FEATURE]);
    cargo.arg("--message-format=json-render-diagnostics");
    run::announce(&cargo);
    let output = cargo.stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("cannot start cargo: {error}"))?;
    if !output.status.success() {
        return Err(format!("cannot build the tests: {}", output.status));
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let mut programs: Vec<_> = messages.lines().filter_map(program).collect();
    // It is likely to have the most tests.
    let size =
        |program: &TestProgram| fs::metadata(&program.executable).map_or(0, |data| data.len());
    programs.sort_by_key(|program| std::cmp::Reverse(size(program)));
    Ok(programs)
}

/// The program that a message of cargo announces.
fn program(message: &str) -> Option<TestProgram> {
    let message: Value = serde_json::from_str(message).ok()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let executable = PathBuf::from(message["executable"].as_str()?);
    let package = Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf();
    let source = Path::new(message["target"]["src_path"].as_str()?);
    let source = source.strip_prefix(&package).unwrap_or(source).to_path_buf();
    Some(TestProgram { source, executable, package, is_idle: false })
}

/// Runs programs, a few at a time, with the environment `env`. Writes to `out` what each prints in one piece, as
/// it comes, in the order in which they start, and hands every line to `seen`. The directory `outputs` gets it,
/// too. Returns the names of those that failed.
pub fn run(
    programs: Vec<TestProgram>,
    outputs: &Path,
    env: &[(&str, String)],
    out: &mut impl Write,
    mut seen: impl FnMut(&str),
) -> Result<Vec<String>, String> {
    fs::create_dir_all(outputs).map_err(|error| format!("{}: {error}", outputs.display()))?;
    let mut waiting = VecDeque::from(programs);
    let mut running = VecDeque::new();
    let mut failed = Vec::new();
    loop {
        while running.iter().filter(|program: &&TestProcess| program.ended.is_none()).count()
            < AT_A_TIME
            && let Some(program) = waiting.pop_front()
        {
            running.push_back(TestProcess::start(program, outputs, env)?);
        }
        for program in &mut running {
            program.look()?;
        }
        let Some(first) = running.front_mut() else { return Ok(failed) };
        first.print(out, &mut seen)?;
        if let Some(status) = first.ended {
            if !status.success() {
                let _ = writeln!(out, "{} failed: {status}", first.name);
                failed.push(first.name.clone());
            }
            running.pop_front();
            continue;
        }
        std::thread::sleep(INTERVAL);
    }
}

/// A program that was started. Its output is in a file: a server that a test leaves behind would keep a pipe open.
struct TestProcess {
    name: String,
    child: Child,
    ended: Option<ExitStatus>,
    output: File,
    /// The beginning of a line.
    rest: Vec<u8>,
    is_announced: bool,
}

impl TestProcess {
    fn start(
        program: TestProgram,
        outputs: &Path,
        env: &[(&str, String)],
    ) -> Result<TestProcess, String> {
        let TestProgram { source, executable, .. } = &program;
        let file = outputs.join(executable.file_name().unwrap_or_default());
        let cannot = |error| format!("cannot run {}: {error}", executable.display());
        let create = || File::options().create(true).append(true).open(&file);
        let _ = fs::remove_file(&file);
        let written = create().map_err(cannot)?;
        let output = File::open(&file).map_err(cannot)?;
        let mut command = program.command();
        command.envs(env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stderr(written.try_clone().map_err(cannot)?).stdout(written);
        let child = command.spawn().map_err(cannot)?;
        let shown = executable.strip_prefix(run::workspace()).unwrap_or(executable);
        let name = format!("{} ({})", source.display(), shown.display());
        Ok(TestProcess { name, child, ended: None, output, rest: Vec::new(), is_announced: false })
    }

    /// Notes whether it has ended.
    fn look(&mut self) -> Result<(), String> {
        if self.ended.is_none() {
            self.ended =
                self.child.try_wait().map_err(|error| format!("{}: {error}", self.name))?;
        }
        Ok(())
    }

    /// Prints what has come since the last time: whole lines, or everything if it has ended.
    fn print(&mut self, out: &mut impl Write, seen: &mut impl FnMut(&str)) -> Result<(), String> {
        if !std::mem::replace(&mut self.is_announced, true) {
            let _ = writeln!(out, "     Running {}", self.name);
        }
        let before = self.rest.len();
        self.output
            .read_to_end(&mut self.rest)
            .map_err(|error| format!("output of {}: {error}", self.name))?;
        if self.rest.len() == before && self.ended.is_none() {
            return Ok(());
        }
        let whole = match self.ended {
            None => self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1),
            Some(_) => self.rest.len(),
        };
        let lines: Vec<u8> = self.rest.drain(..whole).collect();
        // A closed standard output does not end the tests.
        let _ = out.write_all(&lines);
        String::from_utf8_lossy(&lines).lines().for_each(seen);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(text: &str, directory: &Path) -> TestProgram {
        let executable = directory.join(text.split(' ').next().unwrap()).with_extension("sh");
        fs::write(&executable, format!("#!/bin/sh\n{text}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&executable, mode).unwrap();
        TestProgram { source: "x.rs".into(), executable, package: directory.into(), is_idle: false }
    }

    #[test]
    fn each_program_is_in_one_piece_and_failures_have_names() {
        let directory = tempfile::tempdir().unwrap();
        let programs = vec![
            script("a() { echo \"test a::$1 ... ok\"; }; a 1; sleep 0.3; a 2", directory.path()),
            script("b() { echo test b ... FAILED; exit 3; }; b", directory.path()),
            script("c() { (sleep 5) & printf \"test c ... $WORD\"; }; c", directory.path()),
        ];
        let mut lines = Vec::new();
        let env = [("WORD", "ok".to_owned())];
        let mut out = Vec::new();
        let seen = |line: &str| lines.push(line.to_owned());
        let failed = run(programs, &directory.path().join("out"), &env, &mut out, seen).unwrap();
        let expected =
            ["test a::1 ... ok", "test a::2 ... ok", "test b ... FAILED", "test c ... ok"];
        assert_eq!(lines, expected);
        let out = String::from_utf8(out).unwrap();
        assert!(out.contains("a::2 ... ok\n     Running x.rs (") && out.contains("exit status: 3"));
        assert!(failed.len() == 1 && failed[0].starts_with("x.rs ("), "{failed:?}");
    }

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let of = |test: bool, executable: Value| {
            let message = serde_json::json!({
                "reason": "compiler-artifact", "manifest_path": "/w/p/Cargo.toml",
                "target": { "src_path": "/w/p/src/lib.rs" }, "profile": { "test": test },
                "executable": executable,
            });
            program(&message.to_string())
        };
        assert!(of(false, "/w/target/x".into()).is_none() && of(true, Value::Null).is_none());
        assert!(program("{\"reason\":\"build-finished\"}").is_none() && program("text").is_none());
        let found = of(true, "/w/target/x".into()).unwrap();
        assert_eq!((found.source, found.package), ("src/lib.rs".into(), PathBuf::from("/w/p")));
    }
}
