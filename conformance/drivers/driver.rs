//! The KV block format, version 1, in Rust: a parity driver in one file, standard library only.
//!
//!     rustc --edition 2021 -O driver.rs
//!     driver          one JSON case a line in, one {"hex": envelope} a line out
//!     driver --read   one JSON envelope a line in, one {"status": name} a line out
//!
//! Written from formats/kv-block.md, whose sections it follows; the protocol is in
//! conformance/README.md. Input that breaks the protocol ends the program with exit code 2.

use std::collections::HashSet;
use std::io::{self, BufRead, Write};
use std::process::exit;

// ---- 1. the name of a block --------------------------------------------------------------------

fn fnv1a64(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xCBF2_9CE4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

fn block_hash(parent: u64, tokens: &[u32]) -> u64 {
    let bytes = parent.to_le_bytes().into_iter().chain(tokens.iter().flat_map(|t| t.to_le_bytes()));
    fnv1a64(bytes).max(1)
}

// ---- 2. the envelope ---------------------------------------------------------------------------

const MAGIC: &[u8; 4] = b"TLKV";
const VERSION: u16 = 1;
const DTYPE_F16: u16 = 1;
const HEADER: usize = 28;
const RECORD: usize = 12;
const TRAILER: usize = 4;

fn crc32c(bytes: &[u8]) -> u32 {
    let mut r = !0u32;
    for &b in bytes {
        r ^= u32::from(b);
        for _ in 0..8 {
            r = if r & 1 == 1 { r >> 1 ^ 0x82F6_3B78 } else { r >> 1 };
        }
    }
    !r
}

#[derive(Clone, Copy, PartialEq)]
struct Shape {
    block_tokens: u32,
    n_layers: u32,
    n_kv_heads: u32,
    head_dim: u32,
}

impl Shape {
    /// P, if it fits. A zero makes it zero, whatever the others are.
    fn payload_bytes(&self) -> Option<u64> {
        let dims = [self.n_layers, self.n_kv_heads, self.block_tokens, self.head_dim];
        if dims.contains(&0) {
            return Some(0);
        }
        dims.iter().try_fold(4u64, |p, &d| p.checked_mul(u64::from(d)))
    }

    fn envelope_bytes(&self, n_blocks: u32) -> Option<u64> {
        if n_blocks == 0 {
            return Some((HEADER + TRAILER) as u64); // of no blocks the size does not count
        }
        let record = self.payload_bytes()?.checked_add(RECORD as u64)?;
        let records = record.checked_mul(u64::from(n_blocks))?;
        records.checked_add((HEADER + TRAILER) as u64)
    }
}

/// `payload` is [layer][K, V][head][position][dim], float16, P bytes.
struct Block {
    hash: u64,
    n_tokens: u32,
    payload: Vec<u8>,
}

fn write_envelope(shape: &Shape, blocks: &[Block]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&DTYPE_F16.to_le_bytes());
    let n = u32::try_from(blocks.len()).unwrap_or_else(|_| die("too many blocks"));
    for field in [n, shape.block_tokens, shape.n_layers, shape.n_kv_heads, shape.head_dim] {
        out.extend_from_slice(&field.to_le_bytes());
    }
    let row = shape.head_dim as usize * 2;
    for block in blocks {
        out.extend_from_slice(&block.hash.to_le_bytes());
        out.extend_from_slice(&block.n_tokens.to_le_bytes());
        let kept = block.n_tokens as usize * row;
        for head in block.payload.chunks(shape.block_tokens as usize * row) {
            out.extend_from_slice(&head[..kept]);
            out.resize(out.len() + head.len() - kept, 0); // positions past n_tokens are zeros
        }
    }
    let crc = crc32c(&out);
    out.extend_from_slice(&crc.to_le_bytes());
    out
}

// ---- 3. what a reader refuses ------------------------------------------------------------------

fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("a slice of N bytes")
}

/// The blocks, or the name of the status that refuses them.
fn read_envelope(bytes: &[u8], pool: &Shape, room: u32) -> Result<Vec<Block>, &'static str> {
    let u16_at = |at| u16::from_le_bytes(field(bytes, at));
    let u32_at = |at| u32::from_le_bytes(field(bytes, at));
    // 1. the length
    if bytes.len() < HEADER + TRAILER {
        return Err("TL_EFORMAT");
    }
    let n = u32_at(8);
    let shape = Shape {
        block_tokens: u32_at(12),
        n_layers: u32_at(16),
        n_kv_heads: u32_at(20),
        head_dim: u32_at(24),
    };
    if shape.envelope_bytes(n) != Some(bytes.len() as u64) {
        return Err("TL_EFORMAT");
    }
    // 2. magic; 3. the checksum; 4. version and dtype
    let body = &bytes[..bytes.len() - TRAILER];
    if !bytes.starts_with(MAGIC)
        || crc32c(body) != u32_at(body.len())
        || u16_at(4) != VERSION
        || u16_at(6) != DTYPE_F16
    {
        return Err("TL_EFORMAT");
    }
    // 5. the shape
    if shape != *pool {
        return Err("TL_ESHAPE");
    }
    // 6. the records
    let record_bytes = body.len().saturating_sub(HEADER) / (n as usize).max(1);
    let mut names = HashSet::new();
    let mut blocks = Vec::new();
    for record in body[HEADER..].chunks(record_bytes.max(1)) {
        let hash = u64::from_le_bytes(field(record, 0));
        let n_tokens = u32::from_le_bytes(field(record, 8));
        if n_tokens < 1 || n_tokens > shape.block_tokens {
            return Err("TL_EFORMAT");
        }
        if hash != 0 && n_tokens != shape.block_tokens {
            return Err("TL_EFORMAT");
        }
        let hash = if names.insert(hash) { hash } else { 0 }; // the first holder keeps the name
        blocks.push(Block { hash, n_tokens, payload: record[RECORD..].to_vec() });
    }
    if n > room {
        return Err("TL_EFULL");
    }
    Ok(blocks)
}

// ---- JSON: one flat object of strings, unsigned integers and arrays of those -------------------

enum Json {
    Text(String),
    Number(u64),
    Array(Vec<u64>),
}

struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn peek(&mut self) -> u8 {
        while matches!(self.bytes.get(self.at), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
        self.bytes.get(self.at).copied().unwrap_or(0)
    }

    fn accept(&mut self, c: u8) -> bool {
        let found = self.peek() == c;
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, c: u8) {
        if !self.accept(c) {
            die(&format!("expected {:?} at column {}", c as char, self.at + 1));
        }
    }

    fn text(&mut self) -> String {
        self.expect(b'"');
        let start = self.at;
        while self.bytes.get(self.at).is_some_and(|&c| c >= b' ' && c != b'"' && c != b'\\') {
            self.at += 1;
        }
        let text = String::from_utf8_lossy(&self.bytes[start..self.at]).into_owned();
        self.expect(b'"');
        text
    }

    fn number(&mut self) -> u64 {
        self.peek();
        let start = self.at;
        while self.bytes.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
        let digits = std::str::from_utf8(&self.bytes[start..self.at]).unwrap_or("");
        digits.parse().unwrap_or_else(|_| {
            die(&format!("expected an unsigned integer at column {}", start + 1))
        })
    }

    fn value(&mut self) -> Json {
        match self.peek() {
            b'"' => Json::Text(self.text()),
            b'[' => {
                self.expect(b'[');
                let mut items = Vec::new();
                if !self.accept(b']') {
                    items.push(self.number());
                    while self.accept(b',') {
                        items.push(self.number());
                    }
                    self.expect(b']');
                }
                Json::Array(items)
            }
            _ => Json::Number(self.number()),
        }
    }
}

struct Request(Vec<(String, Json)>);

impl Request {
    fn parse(line: &str) -> Self {
        let mut parser = Parser { bytes: line.as_bytes(), at: 0 };
        let mut members = Vec::new();
        parser.expect(b'{');
        loop {
            let key = parser.text();
            parser.expect(b':');
            members.push((key, parser.value()));
            if !parser.accept(b',') {
                break;
            }
        }
        parser.expect(b'}');
        Request(members)
    }

    fn get(&self, key: &str) -> &Json {
        match self.0.iter().find(|(k, _)| k == key) {
            Some((_, value)) => value,
            None => die(&format!("the request lacks {key}")),
        }
    }

    fn u32(&self, key: &str) -> u32 {
        match self.get(key) {
            Json::Number(x) => narrow(*x, key),
            _ => die(&format!("{key} is no integer")),
        }
    }

    fn array<T: TryFrom<u64>>(&self, key: &str) -> Vec<T> {
        match self.get(key) {
            Json::Array(items) => items.iter().map(|&x| narrow(x, key)).collect(),
            _ => die(&format!("{key} is no array")),
        }
    }

    fn bytes(&self, key: &str) -> Vec<u8> {
        let Json::Text(text) = self.get(key) else { die(&format!("{key} is no string")) };
        let pair = |i| text.get(i..i + 2).and_then(|s| u8::from_str_radix(s, 16).ok());
        (0..text.len())
            .step_by(2)
            .map(|i| pair(i).unwrap_or_else(|| die(&format!("{key} is no hex"))))
            .collect()
    }

    fn shape(&self) -> Shape {
        Shape {
            block_tokens: self.u32("block_tokens"),
            n_layers: self.u32("n_layers"),
            n_kv_heads: self.u32("n_kv_heads"),
            head_dim: self.u32("head_dim"),
        }
    }
}

fn narrow<T: TryFrom<u64>>(x: u64, key: &str) -> T {
    T::try_from(x).unwrap_or_else(|_| die(&format!("{key}: {x} is too large")))
}

fn die(what: &str) -> ! {
    eprintln!("driver: {what}");
    exit(2);
}

// ---- the driver --------------------------------------------------------------------------------

/// The blocks an engine would have after the case's tokens; unused positions hold stale bytes.
fn blocks_of(request: &Request, shape: &Shape) -> Vec<Block> {
    let tokens: Vec<u32> = request.array("tokens");
    let values: Vec<u16> = request.array("values"); // [position][layer][K, V][head][dim]
    let (b, d) = (shape.block_tokens as usize, shape.head_dim as usize);
    let rows = shape.n_layers as usize * 2 * shape.n_kv_heads as usize;
    if b == 0 || values.len() != tokens.len() * rows * d {
        die("the number of values does not fit the tokens");
    }
    let mut parent = 0;
    let mut blocks = Vec::new();
    for (i, chunk) in tokens.chunks(b).enumerate() {
        let mut payload = vec![0xFF; rows * b * d * 2];
        for position in 0..chunk.len() {
            for row in 0..rows {
                for dim in 0..d {
                    let value = values[((i * b + position) * rows + row) * d + dim];
                    let at = ((row * b + position) * d + dim) * 2;
                    payload[at..at + 2].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        let hash = if chunk.len() == b { block_hash(parent, chunk) } else { 0 };
        blocks.push(Block { hash, n_tokens: chunk.len() as u32, payload });
        parent = hash;
    }
    blocks
}

fn answer(line: &str, reads: bool) -> String {
    let request = Request::parse(line);
    let shape = request.shape();
    if reads {
        let room = request.u32("n_blocks");
        let status = match read_envelope(&request.bytes("hex"), &shape, room) {
            Ok(_) => "TL_OK",
            Err(status) => status,
        };
        return format!("{{\"status\": \"{status}\"}}");
    }
    let first = write_envelope(&shape, &blocks_of(&request, &shape));
    let read = read_envelope(&first, &shape, u32::MAX).unwrap_or_else(|status| die(status));
    let hex: String = write_envelope(&shape, &read).iter().map(|b| format!("{b:02x}")).collect();
    format!("{{\"hex\": \"{hex}\"}}")
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let reads = arguments == ["--read"];
    if !arguments.is_empty() && !reads {
        die("usage: driver [--read]");
    }
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let line = line.unwrap_or_else(|error| die(&error.to_string()));
        if !line.trim().is_empty() {
            writeln!(out, "{}", answer(&line, reads)).unwrap_or_else(|error| die(&error.to_string()));
        }
    }
}
