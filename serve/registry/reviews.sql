-- The review store's file, version 1 (PRAGMA user_version). Everything is plain but `content` and
-- `note`, which are encrypted.

-- Of the server that was started last: as much of its ReviewPolicy as holds for what is kept.
CREATE TABLE IF NOT EXISTS policy (
    id             INTEGER PRIMARY KEY CHECK (id = 1),
    retention_days INTEGER NOT NULL,
    reviews        INTEGER NOT NULL
) STRICT;

CREATE TABLE IF NOT EXISTS kept (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id   TEXT NOT NULL,
    tenant       TEXT NOT NULL,  -- empty where there is none
    conversation TEXT NOT NULL,  -- an HMAC of its key
    content      TEXT NOT NULL,  -- the messages as JSON
    kept_at      REAL NOT NULL,  -- Unix time
    UNIQUE (request_id, tenant, conversation)
) STRICT;
CREATE INDEX IF NOT EXISTS kept_at ON kept (kept_at);
CREATE INDEX IF NOT EXISTS kept_conversation ON kept (conversation);

-- A rule that the check was put to; where only a reviewer named it, all but the rule is null.
CREATE TABLE IF NOT EXISTS verdict (
    kept        INTEGER NOT NULL REFERENCES kept (id) ON DELETE CASCADE,
    rule        TEXT NOT NULL,
    version     TEXT,
    verdict     TEXT,
    p_violation REAL,
    threshold   REAL,
    confident   INTEGER,
    PRIMARY KEY (kept, rule)
) STRICT, WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS vote (
    kept     INTEGER NOT NULL,
    rule     TEXT NOT NULL,
    reviewer TEXT NOT NULL,
    label    TEXT NOT NULL CHECK (label IN ('violation', 'allow')),
    note     TEXT NOT NULL,
    PRIMARY KEY (kept, rule, reviewer),
    FOREIGN KEY (kept, rule) REFERENCES verdict (kept, rule) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

-- What came with a label of its tenant, where nothing was kept, and nobody else has labelled.
CREATE VIEW IF NOT EXISTS brought AS
SELECT tenant FROM kept
WHERE NOT EXISTS (SELECT * FROM verdict WHERE kept = id AND version IS NOT NULL)
    AND (SELECT count(DISTINCT reviewer) FROM vote WHERE kept = id) < 2;

-- How many reviewers of a rule of a check voted for either label, and whether that settles it.
CREATE VIEW IF NOT EXISTS tally AS
SELECT *, needed <= max(violation, allow) AND min(violation, allow) = 0 AS settled
FROM (
    SELECT kept, rule, coalesce(sum(label = 'violation'), 0) AS violation,
        coalesce(sum(label = 'allow'), 0) AS allow, (SELECT reviews FROM policy) AS needed
    FROM verdict LEFT JOIN vote USING (kept, rule) GROUP BY kept, rule
);

-- What has too few votes, and why somebody is to look at it.
CREATE VIEW IF NOT EXISTS queue AS
SELECT kept, content,
    (SELECT json_group_array(note) FROM vote
        WHERE (vote.kept, vote.rule) = (verdict.kept, verdict.rule) AND note <> '') AS notes,
    confident, request_id, tenant, conversation, kept_at, rule, version, verdict, p_violation,
    threshold, violation + allow AS votes,
    CASE
        WHEN violation + allow > (verdict IS NULL) THEN 'reported'
        WHEN verdict IS NULL THEN 'brought'
        WHEN NOT confident THEN 'uncertain'
        WHEN verdict = 'violation' THEN 'flagged'
        ELSE 'sampled'
    END AS reason
FROM verdict JOIN tally USING (kept, rule) JOIN kept ON kept.id = kept
WHERE violation + allow < needed;

CREATE VIEW IF NOT EXISTS progress AS
SELECT rule, sum(violation + allow < needed) AS waiting, sum(settled AND violation) AS violations,
    sum(settled AND allow) AS allows, sum(violation AND allow) AS disputed
FROM tally GROUP BY rule;
