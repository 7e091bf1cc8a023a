//! `--json` of each command, compared with the table in docs/json.md; and progress in a file and as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerServer, ScratchDir, text};
use serde_json::Value;

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const LIMIT: Duration = Duration::from_secs(60);
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/json.md");

/// Members of an object by their names: type, and whether they can be absent.
type Members = BTreeMap<String, (String, bool)>;

/// The rows of the table, by their names.
fn rows() -> BTreeMap<String, Members> {
    let page = fs::read_to_string(PAGE).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |"));
    rows.map(|row| {
        let (name, members) = row.split_once(" | ").unwrap();
        // Only the part before a semicolon is the list.
        let list = members.split("; ").next().unwrap();
        (name.replace('`', ""), list.split(", ").map(member).collect())
    })
    .collect()
}

fn member(text: &str) -> (String, (String, bool)) {
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let (name, kind) = inner.unwrap_or(text).strip_prefix('`').unwrap().split_once("` ").unwrap();
    (name.to_string(), (kind.to_string(), inner.is_some()))
}

#[track_caller]
fn check(name: &str, members: &Members, value: &Value) {
    let object = value.as_object().unwrap_or_else(|| panic!("{name}: {value}"));
    for (member, value) in object {
        let kind = members.get(member).map(|member| member.0.as_str());
        let kind = kind.unwrap_or_else(|| panic!("{name}: {member} is not in the table"));
        let (kind, or_null) =
            kind.strip_suffix(" or null").map_or((kind, false), |kind| (kind, true));
        let fits = match value {
            Value::Null => or_null,
            Value::Bool(_) => kind == "boolean",
            Value::Number(_) => kind == "number",
            Value::String(_) => kind == "string",
            Value::Array(_) => kind == "list",
            Value::Object(_) => kind == "object",
        };
        assert!(fits, "{name}: {member} is no {kind}: {value}");
    }
    for (member, (_, can_be_absent)) in members {
        assert!(
            *can_be_absent || object.contains_key(member),
            "{name}: {member} is absent: {value}"
        );
    }
}

struct Folder(ScratchDir);

impl Folder {
    fn run(&self, words: &str) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("\"$0\" {words}"), OURS]).current_dir(self.0.path());
        tools::output(&mut command, LIMIT).unwrap()
    }

    fn ours(&self, words: &str) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// What a command prints, also one that has found a difference, without the members that say how a command
    /// about backups ended.
    fn json(&self, words: &str) -> Value {
        let output = self.run(words);
        let said = text(&output.stderr);
        let mut value: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{words}: {error}: {said}"));
        let command = words.split(' ').next().unwrap();
        if ["pull", "restore", "chain", "verify"].contains(&command) {
            let members = value.as_object_mut().unwrap();
            assert_eq!(members.remove("command"), Some(command.into()), "{words}");
            assert_eq!(members.remove("exit_status"), output.status.code().map(Value::from));
            assert_eq!(members.remove("error"), Some(Value::Null), "{words}: {said}");
        }
        value
    }
}

/// Commands with JSON, each with the row of the table that describes it.
const COMMANDS: &[(&str, &str)] = &[
    ("info", "info --json disk.raw"),
    ("info", "info --json whole.raw"),
    ("info", "info --json vm.qcow2"),
    ("info", "info --json --no-content memory:1M"),
    ("info", "info --json vm.ova"),
    ("info", "info --json ova:vm.ova"),
    ("info --chain", "info --chain --json --backing allow over.qcow2"),
    ("map", "map --json disk.raw"),
    ("measure", "measure --json disk.raw"),
    ("copy", "copy --dry-run --json disk.raw other.raw"),
    ("copy", "copy --dry-run --json --journal j disk.raw qcow2:other.qcow2"),
    ("doctor", "doctor --json"),
    ("compare", "compare --json disk.raw disk.raw"),
    ("compare", "compare --json disk.raw qcow2:vm.qcow2"),
    ("compare", "compare --json disk.raw pattern:3M"),
    ("verify", "verify --json disk.raw m"),
    ("verify", "verify --json pattern:3M m"),
    ("checksum", "checksum --json disk.raw"),
    ("check", "check --json vm.qcow2"),
    ("create", "create --json new.raw 1M"),
    ("resize", "resize --json qcow2:vm.qcow2 +1M"),
    ("resize", "resize --json new.raw 2M"),
    ("commit", "commit --json --keep --backing allow over.qcow2"),
    ("rebase", "rebase --json --flatten --backing allow over.qcow2"),
    ("snapshot list", "snapshot list --json vm.qcow2"),
    ("bitmap list", "bitmap list --json vm.qcow2"),
    ("pull", "pull --json --point a pull.toml"),
    ("pull", "pull --json --point b --bitmap a pull.toml"),
    ("pull", "pull --json --point c --bitmap b pull.toml"),
    ("restore", "restore --json store restored.raw"),
    ("chain list", "chain list --json store"),
    ("chain check", "chain check --json store"),
    ("chain prune --dry-run", "chain merge --dry-run --json store"),
    ("chain prune --dry-run", "chain prune --dry-run --json --keep 1 store"),
    ("chain merge", "chain merge --json store"),
    ("chain prune", "chain prune --json --keep 1 store"),
    ("serve", "serve --config serve.toml --check-config --json"),
    ("serve", "serve --config wrong.toml --check-config --json"),
    ("tls init", "tls init --json pki"),
    ("tls init", "tls init --json --psk alice keys.psk"),
    #[cfg(feature = "bench")]
    ("bench device", "bench device --json --time 1s memory:1M"),
    #[cfg(feature = "bench")]
    ("bench load", "bench load --json --count 100 [ blockhaul serve memory:1M ]"),
];

impl Folder {
    fn new() -> Folder {
        let folder = Folder(ScratchDir::new().unwrap());
        folder.ours("copy --manifest m sample:3M disk.raw");
        folder.ours("copy disk.raw qcow2:vm.qcow2");
        folder.ours("create 'qcow2:over.qcow2?backing=qcow2:vm.qcow2' 3M");
        folder.ours("copy partitioning:disk.raw,disk.raw whole.raw");
        let description = "<Envelope><References><File id='f' href='disk.raw'/><File id='g' href='vm.qcow2'/></References>\
                           <Disk fileRef='f'/><Disk fileRef='g'/></Envelope>";
        fs::write(folder.0.file("vm.ovf"), description).unwrap();
        let mut tar = Command::new("tar");
        tar.args(["cf", "vm.ova", "vm.ovf", "disk.raw", "vm.qcow2"]).current_dir(folder.0.path());
        assert!(tools::output(&mut tar, LIMIT).unwrap().status.success());
        fs::write(folder.0.file("serve.toml"), "[[export]]\ndevice = 'disk.raw'\n").unwrap();
        fs::write(folder.0.file("wrong.toml"), "[[export]]\ndevise = 'disk.raw'\n").unwrap();
        folder
    }

    /// A served disk with the bitmaps `a` and `b`, and the file that pulls it.
    fn served(&self) -> PeerServer {
        let control = self.0.file("ctl");
        let words = ["--control", control.to_str().unwrap(), "--export", "a=memory:1M"];
        let server = PeerServer::blockhaul(OURS.as_ref(), &self.0.socket("nbd"), &words).unwrap();
        for name in ["a", "b"] {
            self.ours(&format!("ctl ctl bitmap-add a {name}"));
        }
        let uri = server.uri("a");
        let job = format!("[[disk]]\nname = 'vda'\nsource = '{uri}'\nstore = 'store'\n");
        fs::write(self.0.file("pull.toml"), job).unwrap();
        server
    }
}

#[test]
fn json_is_as_documented() {
    let folder = Folder::new();
    let _server = folder.served();
    let rows = rows();
    let mut seen = BTreeSet::new();
    for (row, words) in COMMANDS {
        let value = folder.json(words);
        let Some(members) = rows.get(*row) else {
            let members = &rows[&format!("{row}: list")];
            let all = value.as_array().unwrap();
            assert!(!all.is_empty(), "{words}");
            all.iter().for_each(|value| check(words, members, value));
            continue;
        };
        seen.insert((*row).to_string());
        check(words, members, &value);
        let lists = [&value].into_iter().chain(value["exports"].as_array().into_iter().flatten());
        for (member, list) in lists.filter_map(Value::as_object).flatten() {
            let name = format!("{row}: {member}");
            let Some(members) = rows.get(&name) else { continue };
            for value in list.as_array().unwrap() {
                seen.insert(name.clone());
                check(&name, members, value);
            }
        }
    }
    // These need other programs, damage, or a pull that was interrupted.
    let others = [
        "snapshot list: snapshots",
        "bitmap list: bitmaps",
        "chain check: damage",
        "chain abandon",
        "info --list",
        "info --list: objects",
    ];
    let unseen: Vec<_> = rows
        .keys()
        .filter(|row| {
            !seen.contains(*row) && !row.ends_with(": list") && !others.contains(&row.as_str())
        })
        .collect();
    assert!(unseen.is_empty(), "{unseen:?}");
}

#[test]
fn damage_and_bitmaps_are_as_documented() {
    let folder = Folder::new();
    let _server = folder.served();
    let rows = rows();
    folder.ours("pull --point a pull.toml");
    let data = fs::read_dir(folder.0.file("store")).unwrap().map(|entry| entry.unwrap().path());
    let data = data.filter(|path| fs::metadata(path).unwrap().len() == 1 << 20);
    data.for_each(|path| fs::write(path, vec![1; 1 << 20]).unwrap());
    let found = folder.json("chain check --json store");
    let damage = found["damage"].as_array().unwrap();
    assert!(!damage.is_empty(), "{found}");
    damage.iter().for_each(|value| check("damage", &rows["chain check: damage"], value));
    folder.ours("bitmap add vm.qcow2 b1");
    let found = folder.json("bitmap list --json vm.qcow2");
    check("bitmap", &rows["bitmap list: bitmaps"], &found["bitmaps"][0]);
}

#[test]
fn each_command_with_json_is_documented() {
    let folder = Folder(ScratchDir::new().unwrap());
    let commands = |help: &str| {
        let list = help.split("\nCommands:\n").nth(1).unwrap_or_default().to_string();
        let names = list.lines().take_while(|line| !line.is_empty());
        names
            .filter_map(|line| Some(line.split_whitespace().next()?.to_string()))
            .collect::<Vec<_>>()
    };
    let rows = rows();
    for command in commands(&folder.ours("--help")) {
        // Its rows are in docs/serve.md.
        if ["ctl", "help"].contains(&command.as_str()) {
            continue;
        }
        let help = folder.ours(&format!("{command} --help"));
        let inner = commands(&help);
        let all = inner.iter().map(|inner| format!("{command} {inner}"));
        for name in if inner.is_empty() { vec![command.clone()] } else { all.collect() } {
            let help = folder.ours(&format!("{name} --help"));
            let has_json = help.lines().any(|line| line.trim() == "--json");
            let is_listed = rows.keys().any(|row| *row == name || *row == format!("{name}: list"));
            assert_eq!(has_json, is_listed, "{name}");
        }
    }
}

#[test]
fn long_work_shows_itself() {
    let folder = Folder::new();
    let _server = folder.served();
    folder.ours("copy --manifest n sample:64M large.raw");
    folder.ours("copy sample:64M qcow2:large.qcow2");
    folder.ours("pull --point a pull.toml");
    folder.ours("pull --point b --bitmap a pull.toml");
    let total = 64 << 20;
    for (command, words, total) in [
        ("compare", "compare --progress=json:3 large.raw large.raw", Some(total)),
        ("checksum", "checksum --progress=json:3 large.raw", Some(total)),
        ("verify", "verify --progress=json:3 large.raw n", Some(total)),
        ("check", "chain check --progress=json:3 store", None),
        ("merge", "chain merge --progress=json:3 store", None),
        ("prune", "chain prune --progress=json:3 --keep 1 store", None),
        ("commit", "commit --keep --progress=json:3 --backing allow over.qcow2", None),
        ("rebase", "rebase --flatten --progress=json:3 --backing allow over.qcow2", None),
        ("resize", "resize --shrink --progress=json:3 qcow2:large.qcow2 1M", None),
        ("resize", "resize --progress=json:3 large.raw 65M", None),
    ] {
        folder.ours(&format!("{words} 3>progress"));
        let lines = fs::read_to_string(folder.0.file("progress")).unwrap();
        let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
        assert_eq!(
            (&last["command"], &last["phase"]),
            (&command.into(), &command.into()),
            "{words}"
        );
        assert_eq!((&last["finished"], &last["success"]), (&true.into(), &true.into()), "{words}");
        if let Some(total) = total {
            assert_eq!((&last["done"], &last["total"]), (&total.into(), &total.into()), "{words}");
        }
    }
}

/// Commands that start workers keep the level of the log that their options ask for.
#[test]
fn verbose_work_on_an_image_has_a_log() {
    let folder = Folder::new();
    for words in [
        "commit --keep --verbose --backing allow over.qcow2",
        "rebase --flatten --verbose --backing allow over.qcow2",
        "resize --verbose qcow2:vm.qcow2 +1M",
    ] {
        folder.ours(&format!("{words} 2>log"));
        let log = fs::read_to_string(folder.0.file("log")).unwrap();
        assert!(log.contains("debug: ") && log.contains("has ended after"), "{words}: {log}");
    }
}

#[test]
fn progress_in_a_file_is_lines() {
    let folder = Folder::new();
    folder.ours("copy --progress --rate 10M pattern:8M copy.raw 2>log");
    let log = fs::read_to_string(folder.0.file("log")).unwrap();
    assert!(!log.contains(['\r', '\u{1b}']), "{log:?}");
    let lines: Vec<_> = log.lines().collect();
    assert!((1..=2).contains(&lines.len()), "one each 10 s: {log}");
    assert!(lines.last().unwrap().starts_with("100% ["), "{log}");
    folder.ours("compare --progress disk.raw disk.raw 2>log");
    let log = fs::read_to_string(folder.0.file("log")).unwrap();
    assert!(log.contains("100% [") && !log.contains("data,"), "{log}");
}
