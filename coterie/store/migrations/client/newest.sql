-- Written by `python -m coterie.store.newest --write`: what the migrations to this revision leave behind.
-- Revision: client_0009
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('client_0009');
CREATE TABLE declined (
	user INTEGER NOT NULL, 
	recipient VARCHAR NOT NULL, 
	reason VARCHAR NOT NULL, 
	times INTEGER NOT NULL, 
	first_ms INTEGER NOT NULL, 
	last_ms INTEGER NOT NULL, 
	PRIMARY KEY (user, recipient, reason)
);
CREATE TABLE history (
	"row" INTEGER NOT NULL, 
	user INTEGER NOT NULL, 
	item VARCHAR NOT NULL, 
	positive BOOLEAN NOT NULL, 
	time INTEGER NOT NULL, 
	part INTEGER NOT NULL, rating FLOAT, 
	PRIMARY KEY ("row"), 
	FOREIGN KEY(user) REFERENCES users (user)
);
CREATE TABLE journal (
	run VARCHAR NOT NULL, 
	participant BLOB NOT NULL, 
	joined INTEGER NOT NULL, 
	ledger VARCHAR NOT NULL, 
	"offset" INTEGER NOT NULL, 
	length INTEGER NOT NULL, 
	private INTEGER NOT NULL, 
	checksum INTEGER NOT NULL, 
	PRIMARY KEY (run, participant)
);
CREATE TABLE outbox (
	entry INTEGER NOT NULL, 
	user INTEGER NOT NULL, 
	owner BLOB NOT NULL, 
	first INTEGER NOT NULL, 
	length INTEGER NOT NULL, 
	rows BLOB NOT NULL, 
	PRIMARY KEY (entry), 
	UNIQUE (user, owner, first), 
	FOREIGN KEY(user) REFERENCES users (user)
);
CREATE TABLE populations (
	run VARCHAR NOT NULL, 
	population BLOB NOT NULL, pass_number INTEGER DEFAULT '-1' NOT NULL, 
	PRIMARY KEY (run)
);
CREATE TABLE preferences (
	user INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	value FLOAT NOT NULL, 
	PRIMARY KEY (user, name), 
	FOREIGN KEY(user) REFERENCES users (user)
);
CREATE TABLE sent (
	user INTEGER NOT NULL, 
	recipient VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	acknowledged INTEGER NOT NULL, 
	bytes INTEGER NOT NULL, 
	first_ms INTEGER NOT NULL, 
	last_ms INTEGER NOT NULL, 
	PRIMARY KEY (user, recipient, kind)
);
CREATE TABLE taken_part (
	user INTEGER NOT NULL, 
	day INTEGER NOT NULL, 
	rounds INTEGER NOT NULL, 
	PRIMARY KEY (user)
);
CREATE TABLE users (
	user INTEGER NOT NULL, 
	name VARCHAR NOT NULL, 
	PRIMARY KEY (user), 
	UNIQUE (name)
);
CREATE TABLE vectors (
	user INTEGER NOT NULL, 
	"row" BLOB NOT NULL, 
	PRIMARY KEY (user)
);
CREATE TABLE visited (
	user INTEGER NOT NULL, 
	owner BLOB NOT NULL, 
	number INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	durable INTEGER NOT NULL, 
	held INTEGER NOT NULL, 
	ran INTEGER NOT NULL, 
	loss FLOAT NOT NULL, 
	PRIMARY KEY (user, owner)
);
CREATE TABLE waves (
	run VARCHAR NOT NULL, 
	"after" INTEGER NOT NULL, 
	waves BLOB NOT NULL, 
	PRIMARY KEY (run, "after")
);
