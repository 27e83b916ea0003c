"""What Paceline uses of torch that is not public, with the reasons: other packages import it from here."""
