//! What a file uses of its crate.

use std::collections::{BTreeMap, BTreeSet};

use super::lexer::{Token, tokens};

/// A path from the root of the crate: modules, and then names in them.
type ModulePath = Vec<String>;

/// A name that a file imports.
#[derive(Debug, PartialEq, Eq)]
struct Import {
    /// What it is called in the file.
    name: String,
    path: ModulePath,
}

/// The names that a file uses.
#[derive(Debug, Default)]
pub struct Imports {
    /// By `use`.
    imported: Vec<Import>,
    /// By paths in the code.
    paths: Vec<ModulePath>,
}

impl Imports {
    /// Reads a file, which is this module.
    pub fn of(text: &str, module: ModulePath) -> Imports {
        let tokens = production_tokens(text);
        let declared = declared(&tokens);
        let mut reader = ImportReader {
            tokens: &tokens,
            at: 0,
            module,
            inner: Vec::new(),
            depth: 0,
            declared: &declared,
            imports: Imports::default(),
        };
        reader.read();
        reader.imports
    }
}

/// The tokens of a file without items that only tests have.
pub fn production_tokens(text: &str) -> Vec<Token> {
    without_tests(&tokens(text))
}

fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        match attribute_end(tokens, at) {
            Some(end) if is_of_tests(&tokens[at..end]) => {
                at = end;
                while let Some(end) = attribute_end(tokens, at) {
                    at = end;
                }
                at = item_end(tokens, at);
            }
            _ => {
                kept.push(tokens[at].clone());
                at += 1;
            }
        }
    }
    kept
}

/// The end of an attribute `#[…]` that begins here.
fn attribute_end(tokens: &[Token], at: usize) -> Option<usize> {
    let begins = tokens.get(at)?.mark('#') && tokens.get(at + 1)?.mark('[');
    begins.then(|| group_end(tokens, at + 1))
}

/// Whether an attribute is `cfg(test)` or `cfg(all(test, …))`.
fn is_of_tests(attribute: &[Token]) -> bool {
    let inside: Vec<_> = attribute[2..].iter().filter(|token| !token.mark('(')).collect();
    let word = |place: usize, word: &str| inside.get(place).is_some_and(|token| token.is(word));
    word(0, "cfg") && (word(1, "test") || (word(1, "all") && word(2, "test")))
}

/// The end of the brackets that begin here.
fn group_end(tokens: &[Token], at: usize) -> usize {
    let mut depth = 0_usize;
    for (place, token) in tokens.iter().enumerate().skip(at) {
        match token {
            Token::Mark('(' | '[' | '{') => depth += 1,
            Token::Mark(')' | ']' | '}') => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return place + 1;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

/// The end of an item that begins here: a semicolon, or the end of its braces.
fn item_end(tokens: &[Token], at: usize) -> usize {
    let mut at = at;
    while let Some(token) = tokens.get(at) {
        match token {
            Token::Mark(';') => return at + 1,
            // Those of `use` are followed by a semicolon.
            Token::Mark('{') if tokens[at - 1] != Token::Path => return group_end(tokens, at),
            Token::Mark('(' | '[' | '{') => at = group_end(tokens, at),
            _ => at += 1,
        }
    }
    tokens.len()
}

/// The modules in files of their own that a file declares.
fn declared(tokens: &[Token]) -> BTreeSet<String> {
    let found = tokens.windows(3).filter_map(|three| match three {
        [word, Token::Name(name), Token::Mark(';')] if word.is("mod") => Some(name.clone()),
        _ => None,
    });
    found.collect()
}

struct ImportReader<'a> {
    tokens: &'a [Token],
    at: usize,
    module: ModulePath,
    /// Modules within the file: their names, and the depth of braces that ends them.
    inner: Vec<(String, usize)>,
    depth: usize,
    declared: &'a BTreeSet<String>,
    imports: Imports,
}

impl ImportReader<'_> {
    fn peek(&self, ahead: usize) -> Option<&Token> {
        self.tokens.get(self.at + ahead)
    }

    fn read(&mut self) {
        while let Some(token) = self.peek(0) {
            match token {
                Token::Mark('{') => self.depth += 1,
                Token::Mark('}') => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.inner.last().is_some_and(|(_, depth)| *depth == self.depth) {
                        self.inner.pop();
                    }
                }
                Token::Name(word) => match word.as_str() {
                    "pub" if self.peek(1).is_some_and(|token| token.mark('(')) => {
                        // A visibility names modules, and uses nothing of them.
                        self.at = group_end(self.tokens, self.at + 1);
                        continue;
                    }
                    "mod" => self.begin_module(),
                    "use" => {
                        self.at += 1;
                        self.tree(&[]);
                        continue;
                    }
                    _ => {
                        self.path();
                        continue;
                    }
                },
                _ => {}
            }
            self.at += 1;
        }
    }

    /// `mod name {`.
    fn begin_module(&mut self) {
        if let (Some(Token::Name(name)), Some(Token::Mark('{'))) = (self.peek(1), self.peek(2)) {
            self.inner.push((name.clone(), self.depth));
        }
    }

    /// A path in the code, or a single name.
    fn path(&mut self) {
        let names = self.names();
        let is_absolute = |names: &[String]| {
            let first = names.first().map(String::as_str).unwrap_or_default();
            matches!(first, "crate" | "self" | "super") || self.declared.contains(first)
        };
        if names.len() > 1
            && is_absolute(&names)
            && let Some(path) = self.absolute(&names)
        {
            self.imports.paths.push(path);
        }
    }

    /// Names with `::` between them.
    fn names(&mut self) -> ModulePath {
        let mut names = ModulePath::new();
        while let Some(Token::Name(name)) = self.peek(0) {
            names.push(name.clone());
            self.at += 1;
            match (self.peek(0), self.peek(1)) {
                (Some(Token::Path), Some(Token::Name(_))) => self.at += 1,
                _ => break,
            }
        }
        names
    }

    /// One tree of `use`, below these names, to its end.
    fn tree(&mut self, above: &[String]) {
        if self.peek(0) == Some(&Token::Path) {
            self.at += 1;
        }
        let mut names = above.to_vec();
        names.extend(self.names());
        if self.peek(0) == Some(&Token::Path) {
            self.at += 1;
        }
        match self.peek(0) {
            Some(Token::Mark('{')) => {
                let end = group_end(self.tokens, self.at);
                self.at += 1;
                while self.at + 1 < end {
                    self.tree(&names);
                    if self.peek(0).is_some_and(|token| token.mark(',')) {
                        self.at += 1;
                    }
                }
                self.at = end;
                return;
            }
            Some(Token::Mark('*')) => {
                self.at += 1;
                names.push("*".to_string());
            }
            _ => {}
        }
        if names.len() > 1 && names.last().is_some_and(|last| last == "self") {
            names.pop();
        }
        let mut name = names.last().cloned().unwrap_or_default();
        if self.peek(0).is_some_and(|token| token.is("as")) {
            if let Some(Token::Name(other)) = self.peek(1) {
                name.clone_from(other);
            }
            self.at += 2;
        }
        // A token that belongs to no tree is passed over, so that the end is reached.
        if !matches!(self.peek(0), Some(Token::Mark(',' | '}' | ';')) | None) {
            self.at += 1;
        }
        if let Some(path) = self.absolute(&names) {
            self.imports.imported.push(Import { name, path });
        }
    }

    /// The path from the root of the crate; none if it leads into another crate.
    fn absolute(&self, names: &[String]) -> Option<ModulePath> {
        let mut base = self.module.clone();
        base.extend(self.inner.iter().map(|(name, _)| name.clone()));
        let mut rest = names;
        match names.first()?.as_str() {
            "crate" => {
                base.clear();
                rest = &names[1..];
            }
            "self" | "super" => {
                while let Some(word @ ("self" | "super")) = rest.first().map(String::as_str) {
                    if word == "super" {
                        base.pop();
                    }
                    rest = &rest[1..];
                }
            }
            first if self.declared.contains(first) => base.clone_from(&self.module),
            _ => return None,
        }
        base.extend(rest.iter().cloned());
        Some(base)
    }
}

/// The modules of a crate.
pub struct ModuleTree<'a> {
    /// The file of each module.
    pub modules: &'a BTreeMap<ModulePath, usize>,
    pub files: &'a [(ModulePath, Imports)],
}

impl ModuleTree<'_> {
    /// The files that a file uses.
    pub fn used(&self, file: usize) -> BTreeSet<usize> {
        let imports = &self.files[file].1;
        let paths = imports.imported.iter().map(|import| &import.path).chain(&imports.paths);
        let used = paths.filter_map(|path| self.file_of(path, &mut BTreeSet::new()));
        used.filter(|used| *used != file).collect()
    }

    /// The file that has what a path names; none for what the root of the crate itself has.
    fn file_of(&self, path: &[String], seen: &mut BTreeSet<ModulePath>) -> Option<usize> {
        let len = (0..=path.len()).rev().find(|len| self.modules.contains_key(&path[..*len]))?;
        let (module, rest) = path.split_at(len);
        let file = self.modules[module];
        let first_time = seen.insert(path.to_vec());
        let behind = rest.first().filter(|_| first_time).and_then(|name| {
            let imports = &self.files[file].1;
            let below = |import: &&Import| {
                import.name == *name && (module.is_empty() || is_in_child(&import.path, module))
            };
            let import = imports.imported.iter().find(below)?;
            self.file_of(&import.path, seen)
        });
        behind.or((!module.is_empty()).then_some(file))
    }
}

/// Whether a path leads into a module below this one.
fn is_in_child(path: &[String], module: &[String]) -> bool {
    path.len() > module.len() + 1 && path.starts_with(module)
}
