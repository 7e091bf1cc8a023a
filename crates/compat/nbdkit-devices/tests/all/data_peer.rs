//! `data:` compared with nbdkit's data plugin: the same descriptions give the same bytes.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use blockhaul_block::DeviceExt;
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::{PeerProgram, ScratchDir, output};

const LIMIT: Duration = Duration::from_secs(120);

/// The plugin's result, written to `out`; false: it refuses.
fn theirs(nbdkit: &PeerProgram, text: &str, out: &Path) -> bool {
    let _ = std::fs::remove_file(out);
    let mut command = nbdkit.command();
    command.arg("--exit-with-parent").arg("data").arg(format!("data={text}"));
    command.arg("--run").arg(format!("nbdcopy \"$uri\" {}", out.display()));
    command.stdin(Stdio::null());
    output(&mut command, LIMIT).unwrap().status.success()
}

fn ours(text: &str) -> blockhaul_block::Result<Vec<u8>> {
    let escaped = text.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
    let spec = format!("data:{escaped}");
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    runtime.block_on(move || async move {
        let registry = Registry { backends: crate::backends(), ..Registry::default() };
        let spec = DeviceSpec::parse(OsStr::new(&spec)).unwrap();
        let stack = registry.open(&spec, Vec::new(), Intent::READ).await?;
        let size = stack.device().facts().size;
        if size == 0 {
            return Ok(Vec::new());
        }
        Ok(stack.device().read(0, size as usize).await?.bytes().to_vec())
    })
}

/// Both give the same, or refuse.
fn compare(nbdkit: &PeerProgram, text: &str, out: &Path) {
    let accepted = theirs(nbdkit, text, out);
    match ours(text) {
        Ok(bytes) => {
            assert!(accepted, "only the plugin refuses {text:?}");
            // For an empty device, a copy is not always made.
            let wanted = std::fs::read(out).unwrap_or_default();
            assert_eq!(bytes.len(), wanted.len(), "size of {text:?}");
            let differs = bytes.iter().zip(&wanted).position(|(ours, theirs)| ours != theirs);
            assert_eq!(differs, None, "{text:?} differs at");
        }
        Err(error) => assert!(!accepted, "{text:?}: {error}"),
    }
}

/// The descriptions in nbdkit's own tests of the format, as in its documentation.
const KNOWN: &[&str] = &[
    "",
    "0",
    "1",
    "65",
    "128",
    "0xff",
    "017",
    "0 0",
    "1 0xcc",
    "\"\"",
    "\"foo\"",
    "\"\\x00foo\\x00\"",
    "@4 \"\\x00\"",
    "@+4 @-1 \"\\x00\"",
    "1 @^4 \"\\x00\"",
    "# ignore\n 1 2 3",
    "0*10",
    "1*2*3*4",
    "\"foo\"*2*50",
    "1*100000",
    "1*1000 @100 0*100",
    "1*1000 @100 0*1000",
    "1 2 \"3\"*3 4",
    "@32766 1 2 3",
    "@32766 1*6",
    "@32766 1*32800",
    "@32766 1*5 @65534 2*5 @32768 0*32768",
    "@+10 @-5 @-4 @+20",
    // Refused.
    "-1",
    "-",
    "256",
    "0400",
    "0xfff",
    "0xffffffffffffffffffffffffffffffff",
    "le16",
    "be64:",
    "le32:abc",
    "le16:0x10000",
    "be64:0x10000000000000000",
    "a",
    "be",
    "le3",
    "?",
    "\\",
    "^",
    "@",
    "@+",
    "@-",
    "@^",
    "<",
    "<(",
    "$",
    "*",
    "[",
    ":",
    "]",
    "@-2",
    "@2 @-3",
    "@2 @-2 @-1",
    "(",
    ")",
    "( ( )",
    ") ( )",
    "\"",
    "\"\\\\",
    "\"\\x\"",
    "*1",
    "0*-1",
    "0*",
    "0*x",
    "0**",
    "0*0x100000000*0x100000000",
    "0[2:]",
    "0[:2]",
    "[:]",
    "\"123\"[4:]",
    "\"123\"[1:0]",
    "</NOFILE",
    "\\a",
    "( 0 -> \\a ) \\a",
    "0 -> \\a \\a \\b",
    "(0 -> \\a) -> \\b \\b \\a",
    "$unknownvar",
    "$nonsense",
];

#[test]
fn known_descriptions_give_the_same_bytes() {
    let nbdkit = blockhaul_testkit::require_peer!("nbdkit");
    blockhaul_testkit::require_peer!("nbdcopy");
    let scratch = ScratchDir::new().unwrap();
    let out = scratch.file("out");
    for text in KNOWN {
        compare(&nbdkit, text, &out);
    }
}

/// An item that nbdkit mostly accepts.
fn item(rng: &mut Rng, file: &str) -> String {
    let number = rng.below(40);
    let item = match rng.below(9) {
        0 | 1 => format!("{}", rng.below(256)),
        2 => format!("{:#x}", rng.below(256)),
        3 => ["\"ab\\x00c\\n\"", "\"\"", "\"x\"", "\"\\\\\\\"\""][number as usize % 4].to_string(),
        4 => return format!("@{number}"),
        5 => return format!("@+{number} @-{}", rng.below(number + 1)),
        6 => return format!("@^{}", 1 << rng.below(7)),
        7 => format!("<{file}"),
        _ => return ["@32760", "@40000 @-100"][number as usize % 2].to_string(),
    };
    match rng.below(4) {
        0 => format!("{item}*{}", rng.below(5)),
        1 => format!("{item}*{} * {}", rng.below(5), rng.below(3)),
        _ => item,
    }
}

#[test]
fn random_descriptions_give_the_same_bytes() {
    let nbdkit = blockhaul_testkit::require_peer!("nbdkit");
    blockhaul_testkit::require_peer!("nbdcopy");
    let scratch = ScratchDir::new().unwrap();
    let out = scratch.file("out");
    let file = scratch.file("file");
    std::fs::File::create(&file).unwrap().write_all(&b"0123456789".repeat(5)).unwrap();
    let file = file.to_str().unwrap();
    let mut rng = Rng::new(rng::seed());
    let count = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 3000 } else { 100 };
    for _ in 0..count {
        let items: Vec<_> = (0..rng.below(12)).map(|_| item(&mut rng, file)).collect();
        compare(&nbdkit, &items.join(" "), &out);
    }
}
