//! `data:` compared with nbdkit's data plugin: the same descriptions give the same bytes.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use blockhaul_block::DeviceExt;
use blockhaul_catalog::{Intent, Registry, Spec, parse_options};
use blockhaul_io::{Config, Runtime};
use blockhaul_testkit::rng::{self, Rng};
use blockhaul_testkit::tools::{Peer, Scratch, output};

const LIMIT: Duration = Duration::from_secs(120);

/// The plugin's result, written to `out`; false: it refuses.
fn theirs(nbdkit: &Peer, text: &str, variables: &[(&str, &str)], out: &Path) -> bool {
    let _ = std::fs::remove_file(out);
    let mut command = nbdkit.command();
    command.arg("--exit-with-parent").arg("data").arg(format!("data={text}"));
    command.args(variables.iter().map(|(key, value)| format!("{key}={value}")));
    command.arg("--run").arg(format!("nbdcopy \"$uri\" {}", out.display()));
    command.stdin(Stdio::null());
    output(&mut command, LIMIT).unwrap().status.success()
}

fn ours(text: &str, variables: &[(&str, &str)]) -> blockhaul_block::Result<Vec<u8>> {
    let escape =
        |text: &str| text.bytes().map(|byte| format!("%{byte:02x}")).collect::<Vec<_>>().concat();
    let mut spec = format!("data:{}?", escape(text));
    for (key, value) in variables {
        write_option(&mut spec, key, &escape(value));
    }
    assert_eq!(parse_options(spec.split_once('?').unwrap().1).unwrap().len(), variables.len());
    let runtime = Runtime::start(&Config { workers: 1, ..Config::default() }).unwrap();
    runtime.block_on(move || async move {
        let registry = Registry { backends: crate::backends(), ..Registry::default() };
        let spec = Spec::parse(OsStr::new(&spec)).unwrap();
        let stack = registry.open(&spec, Vec::new(), Intent::READ).await?;
        let size = stack.device().facts().size;
        if size == 0 {
            return Ok(Vec::new());
        }
        Ok(stack.device().read(0, size as usize).await?.bytes().to_vec())
    })
}

fn write_option(spec: &mut String, key: &str, value: &str) {
    spec.push_str(&format!("{key}={value}&"));
}

/// Both give the same, or refuse.
fn compare(nbdkit: &Peer, text: &str, variables: &[(&str, &str)], out: &Path) {
    let accepted = theirs(nbdkit, text, variables, out);
    match ours(text, variables) {
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
    "le16:1",
    "be16:1",
    "le32:1",
    "be32:1",
    "le64:1",
    "be64:1",
    "le16:0xffff",
    "be32:0xffffffff",
    "le64:0xffffffffffffffff",
    "\"\"",
    "\"foo\"",
    "\"\\x00foo\\x00\"",
    " \"hello\" ( \"\\\"\" \"\\\\\" )*2 \"\\x01\\x02\\x03\" \"\\n\" ",
    "@4 \"\\x00\"",
    "@+4 @-1 \"\\x00\"",
    "1 @^4 \"\\x00\"",
    "# ignore\n 1 2 3",
    "( 0x55 0xAA )*4",
    "( @4 ( 0x21 )*4 )*4",
    "( \"Hello\" @^8 )*2",
    "( @4 )*4 1",
    "( @7 )*4",
    "1 (@2 2) (@3 3)",
    "() ()*2 ( () ) ( ()*2 ) ( () () )*2 ()*2[:0] ()[:0]*2 (()[:0]*2)[:0]*2 ()*0 ( 1 2 3 )*0 ()*1*2*3 \
     () -> \\a \\a (\\a) (\\a)*2 (\\a \\a) (\\a*2 \\a) \\a*2[:0] \\a[:0]*2",
    "0*10",
    "1*2*3*4",
    "( ( ( ( 1 2 ) ) ) )",
    "\"foo\"*2*50",
    "( <(echo hello) )",
    "( $hello )",
    "1*100000",
    "1*1000 @100 0*100",
    "1*1000 @100 0*1000",
    "1 2 \"3\"*3 4",
    "(0x31 0x32) -> \\a (0x35 0x36) -> \\b ((0x33 0x34) -> \\a (0x37 0x38) -> \\c \\a \\a \\b \\c) \\a \\b",
    "1 -> \\1 \"foo\" -> \\foo 42 -> \\a-number 2 -> \\2 ( \\1 ) -> \\test \\test ( 2 -> \\1 ) \\test \
     ( 3 -> \\1 \\test ) 4 -> \\1 \\test ( \\1 ) -> \\test \\test",
    "( $hello )[:4]",
    "( \"Hello\" )[3:5]",
    "\"Hello\"[:]",
    "$hello[:]",
    "$hello[:4]",
    "\"Hello\"[3:]",
    "\"Hello\"[:0]",
    "\"Hello\"[99:99]",
    "<( for i in `seq 0 7`; do printf \"%04d\" $i; done )",
    "<( while :; do printf abc; done )[:65]",
    "$a $b $c",
    "@32766 1 2 3",
    "@32766 1*6",
    "@32766 1*32800",
    "@32766 1*5 @65534 2*5 @32768 0*32768",
    "(0 @100) -> \\a (0 @200) -> \\b \\a @0 \\b",
    "(@50) @200 (@100)",
    "@+10 @-5 @-4 @+20",
    "( 0x55 0xAA @0x200000 @-2 0x55 0xAA ) -> \\1 \\1 * 4",
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

const VARIABLES: &[(&str, &str)] = &[
    ("hello", " \"Hello\" "),
    ("a", " 1 2 "),
    ("b", "$d*3"),
    ("c", " 5*5 "),
    ("d", " 5 "),
    ("nonsense", "NONSENSE"),
];

#[test]
fn known_descriptions_give_the_same_bytes() {
    let nbdkit = blockhaul_testkit::require_peer!("nbdkit");
    blockhaul_testkit::require_peer!("nbdcopy");
    let scratch = Scratch::new().unwrap();
    let out = scratch.file("out");
    for text in KNOWN {
        compare(&nbdkit, text, VARIABLES, &out);
    }
}

/// Makes descriptions that nbdkit mostly accepts.
struct Maker<'a> {
    rng: Rng,
    file: &'a str,
    /// Names of the groups around.
    names: usize,
}

impl Maker<'_> {
    fn items(&mut self, depth: u64) -> String {
        let names = self.names;
        let count = self.rng.below(6);
        let items: Vec<_> = (0..count).map(|_| self.item(depth)).collect();
        self.names = names;
        items.join(" ")
    }

    fn item(&mut self, depth: u64) -> String {
        let number = self.rng.below(40);
        let item = match self.rng.below(if depth == 0 { 11 } else { 16 }) {
            0 | 1 => format!("{}", self.rng.below(256)),
            2 => format!("{:#x}", self.rng.below(256)),
            3 => ["\"ab\\x00c\\n\"", "\"\"", "\"x\"", "\"\\\\\\\"\""][number as usize % 4]
                .to_string(),
            4 => format!("le32:{:#o} ", self.rng.below(1 << 32)).replace("0o", "0"),
            5 => format!("be16:{} ", self.rng.below(1 << 16)),
            6 => return format!("@{number}"),
            7 => return format!("@+{number} @-{}", self.rng.below(number + 1)),
            8 => return format!("@^{}", 1 << self.rng.below(7)),
            9 => match self.names {
                0 => "7".to_string(),
                names => format!("\\n{}", self.rng.below(names as u64)),
            },
            10 => match self.rng.below(8) {
                0 => format!("<{}", self.file),
                1 => format!("<(printf '(%s)' {number})"),
                2 => "@32760".to_string(),
                3 => return "@40000 @-100".to_string(),
                _ => "$a".to_string(),
            },
            _ => format!("({})", self.items(depth - 1)),
        };
        if item.starts_with('@') {
            return item;
        }
        let item = match self.rng.below(8) {
            0 => format!("{item}*{}", self.rng.below(5)),
            1 => format!("{item}*{} * {}", self.rng.below(5), self.rng.below(3)),
            // Often wrong, but only if there is less.
            2 => format!("({item} 1 2 3)[{}:{}]", self.rng.below(3), 3),
            3 => format!("({item} @+2)[:2]"),
            // nbdkit reads nothing from a lone script with this slice.
            4 => format!("({item} @+0)[0:]"),
            _ => item,
        };
        if self.rng.chance(15) {
            self.names += 1;
            return format!("{item} -> \\n{}", self.names - 1);
        }
        item
    }
}

#[test]
fn random_descriptions_give_the_same_bytes() {
    let nbdkit = blockhaul_testkit::require_peer!("nbdkit");
    blockhaul_testkit::require_peer!("nbdcopy");
    let scratch = Scratch::new().unwrap();
    let out = scratch.file("out");
    let file = scratch.file("file");
    std::fs::File::create(&file).unwrap().write_all(&b"0123456789".repeat(5)).unwrap();
    let seed = rng::seed();
    let mut maker = Maker { rng: Rng::new(seed), file: file.to_str().unwrap(), names: 0 };
    let count = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 3000 } else { 100 };
    for _ in 0..count {
        let text = maker.items(3);
        compare(&nbdkit, &text, &[("a", "1 (@3 2) @-1")], &out);
    }
}
